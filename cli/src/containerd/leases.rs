//! Leases: what is made under one stays until it is deleted, and is then removed unless something else
//! names it.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use firn_host::Rfc3339;
use prost::Message;

use super::{CallError, Containerd, namespace_value};

/// `containerd.services.leases.v1.CreateRequest`
#[derive(Clone, PartialEq, Message)]
struct CreateLease {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(map = "string, string", tag = "3")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteLease {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    sync: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Leases {
    #[prost(message, repeated, tag = "1")]
    leases: Vec<LeaseId>,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseId {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct Resources {
    #[prost(message, repeated, tag = "1")]
    resources: Vec<Resource>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// containerd removes a lease with this label at that time.
const EXPIRES: &str = "containerd.io/gc.expire";

/// How long a lease holds that nobody deletes, as containerd's own client has it.
const LIFE: Duration = Duration::from_secs(24 * 60 * 60);

impl Containerd {
    /// The same connection, under a new lease of this id.
    pub async fn with_lease(&self, id: &str) -> Result<Self, CallError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let expires = Rfc3339(now.unwrap_or_default() + LIFE).to_string();
        let request = CreateLease {
            id: id.to_owned(),
            labels: HashMap::from([(EXPIRES.to_owned(), expires)]),
        };
        let call = "/containerd.services.leases.v1.Leases/Create";
        self.call::<_, ()>(call, request).await?;
        Ok(Self {
            channel: self.channel.clone(),
            namespace: self.namespace.clone(),
            lease: Some(namespace_value(id)?),
        })
    }

    /// Deletes a lease. What it alone has kept is gone afterwards.
    pub async fn end_lease(&self, id: &str) -> Result<(), CallError> {
        let call = "/containerd.services.leases.v1.Leases/Delete";
        let (id, sync) = (id.to_owned(), true);
        self.call(call, DeleteLease { id, sync }).await
    }

    /// Ids of all leases of the namespace.
    pub async fn leases(&self) -> Result<Vec<String>, CallError> {
        let listed: Leases = self
            .call("/containerd.services.leases.v1.Leases/List", ())
            .await?;
        Ok(listed.leases.into_iter().map(|lease| lease.id).collect())
    }

    /// Digests of the blobs that a lease keeps.
    pub async fn leased_blobs(&self, id: &str) -> Result<Vec<String>, CallError> {
        let call = "/containerd.services.leases.v1.Leases/ListResources";
        let listed: Resources = self.call(call, id.to_owned()).await?;
        let blobs = listed.resources.into_iter().filter(|one| one.kind == "content");
        Ok(blobs.map(|one| one.id).collect())
    }
}
