//! `containerd.services.snapshots.v1` and `containerd.services.diff.v1`

use std::collections::HashMap;

use prost::Message;

use crate::types::{Descriptor, Mount};

/// A [`SnapshotName`] gives a [`StatResponse`].
pub const STAT: &str = "/containerd.services.snapshots.v1.Snapshots/Stat";
/// A [`SnapshotName`] gives a [`MountsResponse`].
pub const MOUNTS: &str = "/containerd.services.snapshots.v1.Snapshots/Mounts";
/// A [`PrepareRequest`] gives a [`MountsResponse`].
pub const PREPARE: &str = "/containerd.services.snapshots.v1.Snapshots/Prepare";
/// A [`PrepareRequest`] gives a [`MountsResponse`].
pub const VIEW: &str = "/containerd.services.snapshots.v1.Snapshots/View";
/// A [`CommitRequest`].
pub const COMMIT: &str = "/containerd.services.snapshots.v1.Snapshots/Commit";
/// A [`SnapshotName`].
pub const REMOVE: &str = "/containerd.services.snapshots.v1.Snapshots/Remove";
/// An [`ApplyRequest`] gives an [`ApplyResponse`].
pub const APPLY: &str = "/containerd.services.diff.v1.Diff/Apply";
/// A [`DiffRequest`] gives a [`DiffResponse`].
pub const DIFF: &str = "/containerd.services.diff.v1.Diff/Diff";

/// `StatSnapshotRequest`, `MountsRequest` and `RemoveSnapshotRequest`
#[derive(Clone, PartialEq, Message)]
pub struct SnapshotName {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub key: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Info {
    #[prost(string, tag = "2")]
    pub parent: String,
}

/// `StatSnapshotResponse`
#[derive(Clone, PartialEq, Message)]
pub struct StatResponse {
    #[prost(message, optional, tag = "1")]
    pub info: Option<Info>,
}

/// `MountsResponse`, `PrepareSnapshotResponse` and `ViewSnapshotResponse`
#[derive(Clone, PartialEq, Message)]
pub struct MountsResponse {
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<Mount>,
}

/// `PrepareSnapshotRequest` and `ViewSnapshotRequest`
#[derive(Clone, PartialEq, Message)]
pub struct PrepareRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub key: String,
    #[prost(string, tag = "3")]
    pub parent: String,
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
}

/// `CommitSnapshotRequest`
#[derive(Clone, PartialEq, Message)]
pub struct CommitRequest {
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub key: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ApplyRequest {
    #[prost(message, optional, tag = "1")]
    pub diff: Option<Descriptor>,
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ApplyResponse {
    #[prost(message, optional, tag = "1")]
    pub applied: Option<Descriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DiffRequest {
    #[prost(message, repeated, tag = "1")]
    pub left: Vec<Mount>,
    #[prost(message, repeated, tag = "2")]
    pub right: Vec<Mount>,
    #[prost(string, tag = "3")]
    pub media_type: String,
    #[prost(string, tag = "4")]
    pub reference: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct DiffResponse {
    #[prost(message, optional, tag = "3")]
    pub diff: Option<Descriptor>,
}
