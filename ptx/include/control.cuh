// Register budgets of warpgroups and dependent launches (PTX ISA, "setmaxnreg", "griddepcontrol").
#pragma once
#include "types.cuh"

namespace ptx {

// setmaxnreg.inc.sync.aligned.u32 REGISTERS;
// PTX ISA 8.0, sm_90a sm_100a sm_103a sm_107a sm_110a sm_120a sm_121a.
// All warps of a warpgroup execute it; blocks until the registers are free. 24 to 256, a multiple of 8.
// example: setmaxnreg_inc<160>();
template <u32 REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS) : "memory");
}

// setmaxnreg.dec.sync.aligned.u32 REGISTERS;
// PTX ISA 8.0, sm_90a sm_100a sm_103a sm_107a sm_110a sm_120a sm_121a.
// As setmaxnreg_inc; gives registers back.
// example: setmaxnreg_dec<64>();
template <u32 REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS) : "memory");
}

// griddepcontrol.wait;  PTX ISA 7.8, sm_90.
// Waits until the grids this one depends on are complete and their memory is visible; returns at once in a launch
// without the dependent-launch attribute.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents;  PTX ISA 7.8, sm_90.
// Lets grids that depend on this one start their prologue once every CTA has executed it or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ptx
