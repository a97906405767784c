//! `containerd.services.tasks.v1`

use std::collections::HashMap;

use prost::Message;

use crate::types::{Any, Descriptor, Mount};

/// A container's id gives a [`GetResponse`].
pub const GET: &str = "/containerd.services.tasks.v1.Tasks/Get";
/// Nothing gives a [`ListResponse`].
pub const LIST: &str = "/containerd.services.tasks.v1.Tasks/List";
/// A [`CreateRequest`] gives a [`CreateResponse`].
pub const CREATE: &str = "/containerd.services.tasks.v1.Tasks/Create";
/// A container's id gives the pid of init.
pub const START: &str = "/containerd.services.tasks.v1.Tasks/Start";
/// An [`UpdateRequest`].
pub const UPDATE: &str = "/containerd.services.tasks.v1.Tasks/Update";
/// A container's id.
pub const DELETE: &str = "/containerd.services.tasks.v1.Tasks/Delete";
/// A container's id.
pub const PAUSE: &str = "/containerd.services.tasks.v1.Tasks/Pause";
/// A container's id.
pub const RESUME: &str = "/containerd.services.tasks.v1.Tasks/Resume";
/// A [`CheckpointRequest`] gives a [`CheckpointResponse`].
pub const CHECKPOINT: &str = "/containerd.services.tasks.v1.Tasks/Checkpoint";
/// A [`KillRequest`].
pub const KILL: &str = "/containerd.services.tasks.v1.Tasks/Kill";
/// A container's id is answered once its task has ended.
pub const WAIT: &str = "/containerd.services.tasks.v1.Tasks/Wait";

/// `containerd.v1.types.Process`
#[derive(Clone, PartialEq, Message)]
pub struct Process {
    #[prost(string, tag = "2")]
    pub id: String,
    #[prost(uint32, tag = "3")]
    pub pid: u32,
    /// One of [`status`].
    #[prost(int32, tag = "4")]
    pub status: i32,
    /// Where the client has standard output go.
    #[prost(string, tag = "6")]
    pub stdout: String,
    #[prost(uint32, tag = "9")]
    pub exit_status: u32,
}

/// `containerd.v1.types.Status`
pub mod status {
    pub const UNKNOWN: i32 = 0;
    pub const RUNNING: i32 = 2;
    pub const STOPPED: i32 = 3;
    pub const PAUSED: i32 = 4;
}

#[derive(Clone, PartialEq, Message)]
pub struct GetResponse {
    #[prost(message, optional, tag = "1")]
    pub process: Option<Process>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub tasks: Vec<Process>,
}

/// `CreateTaskRequest`
#[derive(Clone, PartialEq, Message)]
pub struct CreateRequest {
    #[prost(string, tag = "1")]
    pub container_id: String,
    #[prost(message, repeated, tag = "3")]
    pub rootfs: Vec<Mount>,
    #[prost(string, tag = "5")]
    pub stdout: String,
    #[prost(string, tag = "6")]
    pub stderr: String,
    #[prost(bool, tag = "7")]
    pub terminal: bool,
    #[prost(message, optional, tag = "9")]
    pub options: Option<Any>,
}

/// `CreateTaskResponse`
#[derive(Clone, PartialEq, Message)]
pub struct CreateResponse {
    #[prost(uint32, tag = "2")]
    pub pid: u32,
}

/// `UpdateTaskRequest`
#[derive(Clone, PartialEq, Message)]
pub struct UpdateRequest {
    #[prost(string, tag = "1")]
    pub container_id: String,
    #[prost(message, optional, tag = "2")]
    pub resources: Option<Any>,
    #[prost(map = "string, string", tag = "3")]
    pub annotations: HashMap<String, String>,
}

/// `CheckpointTaskRequest`
#[derive(Clone, PartialEq, Message)]
pub struct CheckpointRequest {
    #[prost(string, tag = "1")]
    pub container_id: String,
    #[prost(message, optional, tag = "3")]
    pub options: Option<Any>,
}

/// `CheckpointTaskResponse`
#[derive(Clone, PartialEq, Message)]
pub struct CheckpointResponse {
    #[prost(message, repeated, tag = "1")]
    pub descriptors: Vec<Descriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub struct KillRequest {
    #[prost(string, tag = "1")]
    pub container_id: String,
    #[prost(uint32, tag = "3")]
    pub signal: u32,
    #[prost(bool, tag = "4")]
    pub all: bool,
}
