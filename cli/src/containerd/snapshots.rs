//! Snapshots, and the layers that are made from them and put into them.

use std::collections::HashMap;

use prost::Message;

use super::{CallError, Containerd, Descriptor, GotMounts, Mount};

/// `PrepareSnapshotRequest` and `ViewSnapshotRequest`
#[derive(Clone, PartialEq, Message)]
struct NewSnapshot {
    #[prost(string, tag = "1")]
    snapshotter: String,
    #[prost(string, tag = "2")]
    key: String,
    #[prost(string, tag = "3")]
    parent: String,
    #[prost(map = "string, string", tag = "4")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct Commit {
    #[prost(string, tag = "1")]
    snapshotter: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    key: String,
}

/// Names a snapshot, to look at it or to remove it.
#[derive(Clone, PartialEq, Message)]
struct SnapshotName {
    #[prost(string, tag = "1")]
    snapshotter: String,
    #[prost(string, tag = "2")]
    key: String,
}

#[derive(Clone, PartialEq, Message)]
struct Stat {
    #[prost(message, optional, tag = "1")]
    info: Option<Info>,
}

#[derive(Clone, PartialEq, Message)]
struct Info {
    #[prost(string, tag = "2")]
    parent: String,
}

#[derive(Clone, PartialEq, Message)]
struct Apply {
    #[prost(message, optional, tag = "1")]
    diff: Option<Descriptor>,
    #[prost(message, repeated, tag = "2")]
    mounts: Vec<Mount>,
}

#[derive(Clone, PartialEq, Message)]
struct Applied {
    #[prost(message, optional, tag = "1")]
    applied: Option<Descriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct Diff {
    #[prost(message, repeated, tag = "1")]
    left: Vec<Mount>,
    #[prost(message, repeated, tag = "2")]
    right: Vec<Mount>,
    #[prost(string, tag = "3")]
    media_type: String,
    #[prost(string, tag = "4")]
    reference: String,
}

#[derive(Clone, PartialEq, Message)]
struct Diffed {
    #[prost(message, optional, tag = "3")]
    diff: Option<Descriptor>,
}

/// A snapshot, by its snapshotter and its key there.
#[derive(Clone, Copy)]
pub struct Snapshot<'a> {
    pub snapshotter: &'a str,
    pub key: &'a str,
}

impl Snapshot<'_> {
    fn named(self) -> SnapshotName {
        SnapshotName {
            snapshotter: self.snapshotter.to_owned(),
            key: self.key.to_owned(),
        }
    }

    fn to_make(self, parent: &str) -> NewSnapshot {
        NewSnapshot {
            snapshotter: self.snapshotter.to_owned(),
            key: self.key.to_owned(),
            parent: parent.to_owned(),
            labels: HashMap::new(),
        }
    }
}

impl Containerd {
    /// The snapshot below this one; none if there is no such snapshot.
    pub async fn parent_of(&self, snapshot: Snapshot<'_>) -> Result<Option<String>, CallError> {
        let call = "/containerd.services.snapshots.v1.Snapshots/Stat";
        match self.call::<_, Stat>(call, snapshot.named()).await {
            Err(error) if error.is_absent() => Ok(None),
            stat => Ok(Some(stat?.info.unwrap_or_default().parent)),
        }
    }

    /// Makes a snapshot that can be written. Returns what has to be mounted.
    pub async fn prepare(&self, snapshot: Snapshot<'_>, parent: &str) -> Result<Vec<Mount>, CallError> {
        let call = "/containerd.services.snapshots.v1.Snapshots/Prepare";
        let got: GotMounts = self.call(call, snapshot.to_make(parent)).await?;
        Ok(got.mounts)
    }

    /// As [`Self::prepare`], to read alone.
    pub async fn view(&self, snapshot: Snapshot<'_>, parent: &str) -> Result<Vec<Mount>, CallError> {
        let call = "/containerd.services.snapshots.v1.Snapshots/View";
        let got: GotMounts = self.call(call, snapshot.to_make(parent)).await?;
        Ok(got.mounts)
    }

    /// Makes of a snapshot one that others can begin with, of this name.
    pub async fn commit(&self, snapshot: Snapshot<'_>, name: &str) -> Result<(), CallError> {
        let call = "/containerd.services.snapshots.v1.Snapshots/Commit";
        let request = Commit {
            snapshotter: snapshot.snapshotter.to_owned(),
            name: name.to_owned(),
            key: snapshot.key.to_owned(),
        };
        self.call(call, request).await
    }

    pub async fn remove_snapshot(&self, snapshot: Snapshot<'_>) -> Result<(), CallError> {
        let call = "/containerd.services.snapshots.v1.Snapshots/Remove";
        self.call(call, snapshot.named()).await
    }

    /// Unpacks a layer into a snapshot that can be written. Returns the digest of what was unpacked.
    pub async fn apply(&self, layer: Descriptor, mounts: Vec<Mount>) -> Result<String, CallError> {
        let call = "/containerd.services.diff.v1.Diff/Apply";
        let diff = Some(layer);
        let done: Applied = self.call(call, Apply { diff, mounts }).await?;
        Ok(done.applied.unwrap_or_default().digest)
    }

    /// Writes a layer with what `right` has and `left` has not.
    pub async fn diff(
        &self,
        left: Vec<Mount>,
        right: Vec<Mount>,
        media_type: &str,
    ) -> Result<Descriptor, CallError> {
        let call = "/containerd.services.diff.v1.Diff/Diff";
        let request = Diff {
            left,
            right,
            media_type: media_type.to_owned(),
            reference: format!("firn-{}-{}", std::process::id(), "rw"),
        };
        let made: Diffed = self.call(call, request).await?;
        Ok(made.diff.unwrap_or_default())
    }
}
