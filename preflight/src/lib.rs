//! Whether a container can be checkpointed, decided before anything is touched: by its processes and by their environment.
#![forbid(unsafe_code)]

pub mod environment;
pub mod process;
