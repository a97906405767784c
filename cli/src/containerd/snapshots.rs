//! Snapshots, and the layers that are made from them and put into them.

use std::collections::HashMap;

use firn_containerd::snapshots::{
    APPLY, ApplyRequest, ApplyResponse, COMMIT, CommitRequest, DIFF, DiffRequest, DiffResponse,
    MountsResponse, PREPARE, PrepareRequest, REMOVE, STAT, SnapshotName, StatResponse, VIEW,
};

use super::{CallError, Container, Containerd, Descriptor, Mount};

/// A snapshot, by its snapshotter and its key there.
#[derive(Clone, Copy)]
pub struct Snapshot<'a> {
    pub snapshotter: &'a str,
    pub key: &'a str,
}

impl<'a> Snapshot<'a> {
    /// That of a container's root file system.
    pub fn of(container: &'a Container) -> Self {
        Self {
            snapshotter: &container.snapshotter,
            key: &container.snapshot_key,
        }
    }
}

impl Snapshot<'_> {
    fn named(self) -> SnapshotName {
        SnapshotName {
            snapshotter: self.snapshotter.to_owned(),
            key: self.key.to_owned(),
        }
    }

    fn to_make(self, parent: &str) -> PrepareRequest {
        PrepareRequest {
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
        match self.call::<_, StatResponse>(STAT, snapshot.named()).await {
            Err(error) if error.is_absent() => Ok(None),
            stat => Ok(Some(stat?.info.unwrap_or_default().parent)),
        }
    }

    /// Makes a snapshot that can be written. Returns what has to be mounted.
    pub async fn prepare(&self, snapshot: Snapshot<'_>, parent: &str) -> Result<Vec<Mount>, CallError> {
        let got: MountsResponse = self.call(PREPARE, snapshot.to_make(parent)).await?;
        Ok(got.mounts)
    }

    /// As [`Self::prepare`], to read alone.
    pub async fn view(&self, snapshot: Snapshot<'_>, parent: &str) -> Result<Vec<Mount>, CallError> {
        let got: MountsResponse = self.call(VIEW, snapshot.to_make(parent)).await?;
        Ok(got.mounts)
    }

    /// Makes of a snapshot one that others can begin with, of this name.
    pub async fn commit(&self, snapshot: Snapshot<'_>, name: &str) -> Result<(), CallError> {
        let request = CommitRequest {
            snapshotter: snapshot.snapshotter.to_owned(),
            name: name.to_owned(),
            key: snapshot.key.to_owned(),
        };
        self.call(COMMIT, request).await
    }

    pub async fn remove_snapshot(&self, snapshot: Snapshot<'_>) -> Result<(), CallError> {
        self.call(REMOVE, snapshot.named()).await
    }

    /// Unpacks a layer into a snapshot that can be written. Returns the digest of what was unpacked.
    pub async fn apply(&self, layer: Descriptor, mounts: Vec<Mount>) -> Result<String, CallError> {
        let diff = Some(layer);
        let request = ApplyRequest { diff, mounts };
        let done: ApplyResponse = self.call(APPLY, request).await?;
        Ok(done.applied.unwrap_or_default().digest)
    }

    /// Writes a layer with what `right` has and `left` has not.
    pub async fn diff(
        &self,
        left: Vec<Mount>,
        right: Vec<Mount>,
        media_type: &str,
    ) -> Result<Descriptor, CallError> {
        let request = DiffRequest {
            left,
            right,
            media_type: media_type.to_owned(),
            reference: format!("firn-{}-{}", std::process::id(), "rw"),
        };
        let made: DiffResponse = self.call(DIFF, request).await?;
        Ok(made.diff.unwrap_or_default())
    }
}
