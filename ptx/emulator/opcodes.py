"""Numbers of the decoded operations. The high byte is the family, i.e. the njit function that executes it."""

# ---- family 1: integer and bit operations whose lane loop vectorises (lanes_integer.integer_fast)
INTEGER = 0x100
(ADD, SUB, MUL_LO, MAD_LO, MUL_WIDE_S, MUL_WIDE_U, MAD_WIDE_S, MAD_WIDE_U, AND, OR, XOR, NOT, SHL, SHR_U,
 SHR_S, MIN_S, MIN_U, MAX_S, MAX_U, MOV, NEG, ABS, SEXT, SELP, LOP3, SLCT_S, SLCT_F,
 PRMT) = range(INTEGER, INTEGER + 28)

# ---- family 2: integer and bit operations executed lane by lane (lanes_integer.integer_lane)
BITS = 0x200
(MUL_HI, MAD_HI, DIV, REM, SAD, POPC, CLZ, BFIND, BREV, BFE, BFI, SZEXT, BMSK, DP4A, DP2A, MUL24, MAD24,
 FNS, SHF, CNOT, ADD_SAT, SUB_SAT, MAD_HI_SAT, PRMT_MODE, ADDX2, MINX2, MAXX2, CVT_INT, CVT_PACK,
 VIDEO) = range(
     BITS, BITS + 30)

# ---- family 3: comparisons and predicate logic (lanes_predicate)
PREDICATE = 0x300
(SETP_INT, SETP_F, SET_INT, SET_F, PRED_LOGIC, TESTP, ISSPACEP, SETP_HALF, SET_HALF, ADD_CC, SUB_CC,
 MAD_CC) = range(PREDICATE, PREDICATE + 12)

# ---- family 4: f32 and f64 arithmetic (lanes_float)
FLOAT = 0x400
(FADD, FMUL, FFMA, FMIN, FMAX, FNEG, FABS, FDIV, FRCP, FSQRT, FRSQRT, EX2, LG2, SIN, COS, TANH, FMIN3,
 FMAX3, FDIV_APPROX, FRCP_APPROX, FSQRT_APPROX, RCP64H, RSQRT64H) = range(FLOAT, FLOAT + 23)

# ---- family 5: half, bfloat16 and packed arithmetic (lanes_half)
HALF = 0x500
(HADD, HSUB, HMUL, HFMA, HMIN, HMAX, HNEG, HABS, HEX2, HTANH, F2ADD, F2MUL, F2FMA, HMIXADD, HMIXSUB,
 HMIXFMA, HMIN3, HMAX3) = range(HALF, HALF + 18)

# ---- family 6: conversions that involve a floating format (lanes_convert)
CONVERT = 0x600
(CVT_FF, CVT_FI, CVT_IF, CVT_PACK_F, CVT_UNPACK_F) = range(CONVERT, CONVERT + 5)

# ---- family 7: memory (lanes_memory)
MEMORY = 0x700
(LD, ST, ATOM, NOP, LDMATRIX) = range(MEMORY, MEMORY + 5)

# ---- family 8: communication inside a warp (lanes_warp)
WARP = 0x800
(SHFL, VOTE, MATCH, REDUX, ACTIVEMASK, ELECT, WARP_SYNC, MOV_SPECIAL, CLOCK, REDUX_F) = range(WARP, WARP + 10)

# ---- family 9: control, handled by the interpreter loop itself (engine)
CONTROL = 0x900
(BRA, BRX, CALL, CALL_INDIRECT, RET, EXIT, TRAP, BARRIER, FENCE, FENCE_PROXY, MOV_LOCAL) = range(
     CONTROL, CONTROL + 11)

# ---- family 10: operations that leave for Python, and compiled matrix operations
PYTHON = 0xA00
MATRIX = 0xB00

# ---- family 12: cp.async (warp_copies)
COPY = 0xC00
(CP_ASYNC, CP_COMMIT, CP_WAIT) = range(COPY, COPY + 3)
