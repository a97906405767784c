//! CRIU's plugin for what forked children have of GPUs, and for Unix sockets that lead outside.
//!
//! A child that was forked from a CUDA process inherits descriptors and mappings of the driver's nodes. It
//! can do nothing with them, the driver does not close them, and CRIU alone refuses the whole container. With
//! this plugin CRIU dumps them by the node's name. The source is not touched. The copy gets a descriptor of
//! the same node, or of a GPU that it was given, and in the place of a mapping zeroed memory.
//!
//! CRIU alone refuses a container with a Unix socket that is connected to a process outside. With this plugin
//! it dumps those that firn closes in the image.
//!
//! firn puts the plugin into CRIU's `libdir` only for a container whose descriptors it has looked at: it
//! refuses processes that may use what they have open, before the driver is called. CRIU's interface is
//! `criu-plugin.h` of CRIU 4.0 and later.
#![deny(unsafe_code)]

#[cfg(test)]
mod fuzz;
mod hooks;
mod node;
mod unix_sockets;
