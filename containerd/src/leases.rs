//! `containerd.services.leases.v1`

use std::collections::HashMap;

use prost::Message;

/// A [`CreateRequest`].
pub const CREATE: &str = "/containerd.services.leases.v1.Leases/Create";
/// A [`DeleteRequest`].
pub const DELETE: &str = "/containerd.services.leases.v1.Leases/Delete";
/// Nothing gives a [`ListResponse`].
pub const LIST: &str = "/containerd.services.leases.v1.Leases/List";
/// A lease's id gives a [`ListResourcesResponse`].
pub const LIST_RESOURCES: &str = "/containerd.services.leases.v1.Leases/ListResources";
/// An [`AddRequest`].
pub const ADD: &str = "/containerd.services.leases.v1.Leases/AddResource";

#[derive(Clone, PartialEq, Message)]
pub struct AddRequest {
    /// Id of the lease.
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(message, optional, tag = "2")]
    pub resource: Option<Resource>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CreateRequest {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(map = "string, string", tag = "3")]
    pub labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DeleteRequest {
    #[prost(string, tag = "1")]
    pub id: String,
    /// The answer comes once what the lease alone has kept is gone.
    #[prost(bool, tag = "2")]
    pub sync: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct Lease {
    #[prost(string, tag = "1")]
    pub id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub leases: Vec<Lease>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Resource {
    #[prost(string, tag = "1")]
    pub id: String,
    /// `content`, or `snapshots/SNAPSHOTTER`.
    #[prost(string, tag = "2")]
    pub r#type: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ListResourcesResponse {
    #[prost(message, repeated, tag = "1")]
    pub resources: Vec<Resource>,
}
