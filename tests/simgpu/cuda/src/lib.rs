//! `libcuda.so.1` of the simulated driver: the driver API as far as the test workloads and firn's worker call
//! it.
//!
//! It imitates what NVIDIA's driver 580 was seen to do (states, refusals, what stays open, what hangs) and
//! nothing else. Answers that nobody measured are marked where they are made. "GPU" memory is that of
//! `simgpu-model`; kernels are this library's own versions of the workload's, chosen by name.
//!
//! Two threads serve each process. The restore thread carries out lock, checkpoint, restore and unlock for
//! callers in other processes and is the only one that opens or leaves the devices. The event thread does
//! nothing but answer the restore thread's handshake, which is why a lock needs the application's threads to
//! run.

mod abi;
mod api;
mod caller;
mod driver;
mod error;
mod event;
mod gate;
mod hardware;
mod kernels;
mod pieces;
mod process;
mod service;
mod transfer;
mod waits;
mod wire;
