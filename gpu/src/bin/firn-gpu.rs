//! Driver worker of the firn container runtime; see `firn_gpu::worker`.

#![forbid(unsafe_code)]

fn main() {
    firn_gpu::worker::main()
}
