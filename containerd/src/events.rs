//! `containerd.services.events.v1`, and the type of firn's own events.

use prost::Message;

use crate::types::Any;

/// A [`SubscribeRequest`] gives a stream of [`Envelope`].
pub const SUBSCRIBE: &str = "/containerd.services.events.v1.Events/Subscribe";

#[derive(Clone, PartialEq, Message)]
pub struct SubscribeRequest {
    #[prost(string, repeated, tag = "1")]
    pub filters: Vec<String>,
}

/// `containerd.types.Envelope`
#[derive(Clone, PartialEq, Message)]
pub struct Envelope {
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(string, tag = "3")]
    pub topic: String,
    #[prost(message, optional, tag = "4")]
    pub event: Option<Any>,
}

/// `containerd.types.transfer.Progress`
#[derive(Clone, PartialEq, Message)]
pub struct Progress {
    #[prost(string, tag = "1")]
    pub event: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(int64, tag = "4")]
    pub progress: i64,
    #[prost(int64, tag = "5")]
    pub total: i64,
}
