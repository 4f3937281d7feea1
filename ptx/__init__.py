"""Everything about PTX: device headers, descriptor encoders, the emulator."""
