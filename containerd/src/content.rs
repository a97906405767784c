//! `containerd.services.content.v1`

use std::collections::HashMap;

use prost::Message;

use crate::types::FieldMask;

/// A digest gives an [`InfoResponse`].
pub const INFO: &str = "/containerd.services.content.v1.Content/Info";
/// An [`UpdateRequest`].
pub const UPDATE: &str = "/containerd.services.content.v1.Content/Update";
/// A [`ReadRequest`] gives a stream of [`ReadResponse`].
pub const READ: &str = "/containerd.services.content.v1.Content/Read";
/// Each [`WriteRequest`] of a stream is answered.
pub const WRITE: &str = "/containerd.services.content.v1.Content/Write";

/// `Info`, as it is read.
#[derive(Clone, PartialEq, Message)]
pub struct Info {
    #[prost(int64, tag = "2")]
    pub size: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct InfoResponse {
    #[prost(message, optional, tag = "1")]
    pub info: Option<Info>,
}

/// `Info`, to change its labels.
#[derive(Clone, PartialEq, Message)]
pub struct InfoLabels {
    #[prost(string, tag = "1")]
    pub digest: String,
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub info: Option<InfoLabels>,
    #[prost(message, optional, tag = "2")]
    pub update_mask: Option<FieldMask>,
}

/// `ReadContentRequest`
#[derive(Clone, PartialEq, Message)]
pub struct ReadRequest {
    #[prost(string, tag = "1")]
    pub digest: String,
    #[prost(int64, tag = "2")]
    pub offset: i64,
    /// 0: to its end.
    #[prost(int64, tag = "3")]
    pub size: i64,
}

/// `ReadContentResponse`
#[derive(Clone, PartialEq, Message)]
pub struct ReadResponse {
    #[prost(bytes = "vec", tag = "2")]
    pub data: Vec<u8>,
}

/// `WriteContentRequest`
#[derive(Clone, PartialEq, Message)]
pub struct WriteRequest {
    /// One of [`action`].
    #[prost(int32, tag = "1")]
    pub action: i32,
    #[prost(string, tag = "2")]
    pub reference: String,
    #[prost(int64, tag = "3")]
    pub total: i64,
    #[prost(string, tag = "4")]
    pub expected: String,
    #[prost(int64, tag = "5")]
    pub offset: i64,
    #[prost(bytes = "vec", tag = "6")]
    pub data: Vec<u8>,
    #[prost(map = "string, string", tag = "7")]
    pub labels: HashMap<String, String>,
}

/// `WriteAction`
pub mod action {
    pub const STAT: i32 = 0;
    pub const WRITE: i32 = 1;
    pub const COMMIT: i32 = 2;
}
