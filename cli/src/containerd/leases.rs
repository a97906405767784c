//! Leases: what is made under one stays until it is deleted, and is then removed unless something else
//! names it.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use firn_containerd::leases::{
    ADD, AddRequest, CREATE, CreateRequest, DELETE, DeleteRequest, LIST, LIST_RESOURCES,
    ListResourcesResponse, ListResponse, Resource,
};
use firn_host::Rfc3339;

use super::{CallError, Containerd, Snapshot, namespace_value};

/// containerd removes a lease with this label at that time.
const EXPIRES: &str = "containerd.io/gc.expire";

/// How long a lease holds that nobody deletes, as containerd's own client has it.
const LIFE: Duration = Duration::from_secs(24 * 60 * 60);

impl Containerd {
    /// The same connection, under a new lease of this id.
    pub async fn with_lease(&self, id: &str) -> Result<Self, CallError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let expires = Rfc3339(now.unwrap_or_default() + LIFE).to_string();
        let request = CreateRequest {
            id: id.to_owned(),
            labels: HashMap::from([(EXPIRES.to_owned(), expires)]),
        };
        self.call::<_, ()>(CREATE, request).await?;
        Ok(Self {
            channel: self.channel.clone(),
            namespace: self.namespace.clone(),
            lease: Some(namespace_value(id)?),
        })
    }

    /// Has the lease of this connection keep a snapshot that was made before, as long as it holds.
    pub async fn keep_snapshot(&self, snapshot: Snapshot<'_>) -> Result<(), CallError> {
        let lease = self.lease.as_ref().and_then(|lease| lease.to_str().ok());
        let id = lease.unwrap_or_default().to_owned();
        let resource = Some(Resource {
            id: snapshot.key.to_owned(),
            r#type: format!("snapshots/{}", snapshot.snapshotter),
        });
        self.call(ADD, AddRequest { id, resource }).await
    }

    /// Deletes a lease. What it alone has kept is gone afterwards.
    pub async fn end_lease(&self, id: &str) -> Result<(), CallError> {
        let (id, sync) = (id.to_owned(), true);
        self.call(DELETE, DeleteRequest { id, sync }).await
    }

    /// Ids of all leases of the namespace.
    pub async fn leases(&self) -> Result<Vec<String>, CallError> {
        let listed: ListResponse = self.call(LIST, ()).await?;
        Ok(listed.leases.into_iter().map(|lease| lease.id).collect())
    }

    /// Digests of the blobs that a lease keeps.
    pub async fn leased_blobs(&self, id: &str) -> Result<Vec<String>, CallError> {
        let listed: ListResourcesResponse = self.call(LIST_RESOURCES, id.to_owned()).await?;
        let blobs = listed.resources.into_iter().filter(|one| one.r#type == "content");
        Ok(blobs.map(|one| one.id).collect())
    }
}
