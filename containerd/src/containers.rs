//! `containerd.services.containers.v1`

use std::collections::HashMap;

use prost::Message;

use crate::types::{Any, FieldMask};

/// An id gives a [`GetResponse`].
pub const GET: &str = "/containerd.services.containers.v1.Containers/Get";
/// A [`ListRequest`] gives a [`ListResponse`].
pub const LIST: &str = "/containerd.services.containers.v1.Containers/List";
/// A [`CreateRequest`].
pub const CREATE: &str = "/containerd.services.containers.v1.Containers/Create";
/// An [`UpdateRequest`].
pub const UPDATE: &str = "/containerd.services.containers.v1.Containers/Update";
/// An id.
pub const DELETE: &str = "/containerd.services.containers.v1.Containers/Delete";

#[derive(Clone, PartialEq, Message)]
pub struct Container {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(map = "string, string", tag = "2")]
    pub labels: HashMap<String, String>,
    /// Name of the image that its root file system began with.
    #[prost(string, tag = "3")]
    pub image: String,
    #[prost(message, optional, tag = "4")]
    pub runtime: Option<Runtime>,
    /// The OCI spec, as JSON.
    #[prost(message, optional, tag = "5")]
    pub spec: Option<Any>,
    #[prost(string, tag = "6")]
    pub snapshotter: String,
    #[prost(string, tag = "7")]
    pub snapshot_key: String,
    /// What its client notes, as JSON, by names of the client's.
    #[prost(map = "string, message", tag = "10")]
    pub extensions: HashMap<String, Any>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Runtime {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub options: Option<Any>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetResponse {
    #[prost(message, optional, tag = "1")]
    pub container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CreateRequest {
    #[prost(message, optional, tag = "1")]
    pub container: Option<Container>,
}

/// Fields that the mask names are taken. A label that only the mask names (`labels.NAME`) is removed.
#[derive(Clone, PartialEq, Message)]
pub struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub container: Option<Container>,
    #[prost(message, optional, tag = "2")]
    pub update_mask: Option<FieldMask>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListRequest {
    #[prost(string, repeated, tag = "1")]
    pub filters: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Container>,
}
