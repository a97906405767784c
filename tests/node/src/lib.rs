//! Test nodes: hosts of their own, made of a Debian root and namespaces, with containerd inside.
//!
//! A node stands for one machine of a cluster. Its root is an overlay over a cached debootstrap root, its
//! processes have their own mount, pid, net, ipc, uts and cgroup namespaces, its `/dev` is its own.
//! Everything that a node mounts lies in its mount namespace and all its processes in its pid namespace and
//! below its own cgroups, so killing its init ends it, and the little that the kernel keeps (cgroup
//! directories, loop devices) can be distinguished from what is the host's. The host's containerd, mounts and
//! cgroups are never touched.
//!
//! Who may leave what behind:
//! - a [`Node`] that is dropped or whose process is killed ends: a guard process waits on a pipe for that;
//! - its record in `target/node/run/NAME` stays until [`Store::clean`] has removed its cgroups and loop
//!   devices, which every start does first;
//! - [`Node::leave`] lets one outlive its maker; [`Node::find`] and [`Node::stop`] get it back.
#![forbid(unsafe_code)]

mod cgroup;
mod command;
mod containerd;
mod debootstrap;
mod go;
mod host;
mod image;
mod link;
mod node;
mod packages;
mod platform;
mod record;
mod remnants;
mod store;
mod suite;
mod sweep;
mod wait;

pub use cgroup::{Cgroup, CgroupMode};
pub use command::Output;
pub use go::{GoOptions, SlowGo, c_build_of, go_build, go_build_of, go_install, go_lacks};
pub use image::Image;
pub use link::{Link, link};
pub use node::{Builder, Node};
pub use platform::Platform;
pub use record::{ProcessId, Record, Status};
pub use remnants::{Process, Remnants};
pub use store::Store;
pub use suite::Suite;
pub use wait::wait_for;
