//! Reading of images and of the content store.

use std::collections::HashMap;

use prost::Message;
use tonic::{Code, Streaming};

use super::{CallError, Containerd};

/// Largest answer that is taken: lists of images.
pub(super) const MAX_ANSWER: usize = 16 << 20;

/// `containerd.services.images.v1.Image`
#[derive(Clone, PartialEq, Message)]
pub struct Image {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(map = "string, string", tag = "2")]
    pub labels: HashMap<String, String>,
    #[prost(message, optional, tag = "3")]
    pub target: Option<Descriptor>,
    /// Set by containerd.
    #[prost(message, optional, tag = "7")]
    pub created_at: Option<Timestamp>,
}

/// `google.protobuf.Timestamp`
#[derive(Clone, PartialEq, Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
}

/// `containerd.types.Descriptor`
#[derive(Clone, PartialEq, Message)]
pub struct Descriptor {
    #[prost(string, tag = "1")]
    pub media_type: String,
    #[prost(string, tag = "2")]
    pub digest: String,
    #[prost(int64, tag = "3")]
    pub size: i64,
    #[prost(map = "string, string", tag = "5")]
    pub annotations: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct Listed {
    #[prost(message, repeated, tag = "1")]
    images: Vec<Image>,
}

/// `containerd.services.namespaces.v1.ListNamespacesResponse`
#[derive(Clone, PartialEq, Message)]
struct ListedNamespaces {
    #[prost(message, repeated, tag = "1")]
    namespaces: Vec<Name>,
}

#[derive(Clone, PartialEq, Message)]
struct Name {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct ReadContent {
    #[prost(string, tag = "1")]
    digest: String,
    #[prost(int64, tag = "2")]
    offset: i64,
    #[prost(int64, tag = "3")]
    size: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Content {
    #[prost(bytes = "vec", tag = "2")]
    pub data: Vec<u8>,
}

/// `containerd.services.content.v1.UpdateRequest`
#[derive(Clone, PartialEq, Message)]
struct UpdateContent {
    #[prost(message, optional, tag = "1")]
    info: Option<Labelled>,
    #[prost(message, optional, tag = "2")]
    mask: Option<FieldMask>,
}

/// `containerd.services.content.v1.Info`, to change its labels.
#[derive(Clone, PartialEq, Message)]
struct Labelled {
    #[prost(string, tag = "1")]
    digest: String,
    #[prost(map = "string, string", tag = "5")]
    labels: HashMap<String, String>,
}

/// `google.protobuf.FieldMask`
#[derive(Clone, PartialEq, Message)]
struct FieldMask {
    #[prost(string, repeated, tag = "1")]
    paths: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct GotInfo {
    #[prost(message, optional, tag = "1")]
    info: Option<Info>,
}

/// `containerd.services.content.v1.Info`
#[derive(Clone, PartialEq, Message)]
struct Info {
    #[prost(int64, tag = "2")]
    size: i64,
}

const READ: &str = "/containerd.services.content.v1.Content/Read";

/// The next part of a blob; none at its end.
pub async fn next(blob: &mut Streaming<Content>) -> Result<Option<Content>, CallError> {
    blob.message().await.map_err(super::failed(READ))
}

impl Containerd {
    /// Names of all namespaces.
    pub async fn namespaces(&self) -> Result<Vec<String>, CallError> {
        let call = "/containerd.services.namespaces.v1.Namespaces/List";
        let listed: ListedNamespaces = self.call(call, ()).await?;
        Ok(listed
            .namespaces
            .into_iter()
            .map(|namespace| namespace.name)
            .collect())
    }

    /// The images of the connection's namespace.
    pub async fn images(&self) -> Result<Vec<Image>, CallError> {
        let listed: Listed = self
            .call("/containerd.services.images.v1.Images/List", ())
            .await?;
        Ok(listed.images)
    }

    /// A part of a blob: fewer bytes at its end, and none for a part that goes beyond it.
    pub async fn content(&self, digest: &str, offset: u64, size: u64) -> Result<Vec<u8>, CallError> {
        match self.read(digest, offset, size).await {
            Err(CallError::Call { status, .. }) if status.code() == Code::OutOfRange => Ok(Vec::new()),
            read => read,
        }
    }

    /// Bytes of a blob.
    pub async fn size(&self, digest: &str) -> Result<i64, CallError> {
        let call = "/containerd.services.content.v1.Content/Info";
        let got: GotInfo = self.call(call, digest.to_owned()).await?;
        Ok(got.info.unwrap_or_default().size)
    }

    /// Adds labels to a blob.
    pub async fn label_blob(&self, digest: &str, labels: HashMap<String, String>) -> Result<(), CallError> {
        let call = "/containerd.services.content.v1.Content/Update";
        let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
        let info = Labelled {
            digest: digest.to_owned(),
            labels,
        };
        let request = UpdateContent {
            info: Some(info),
            mask: Some(FieldMask { paths }),
        };
        self.call(call, request).await
    }

    /// A whole blob, in parts.
    pub async fn blob(&self, digest: &str) -> Result<Streaming<Content>, CallError> {
        let request = ReadContent {
            digest: digest.to_owned(),
            ..ReadContent::default()
        };
        self.stream(READ, request).await
    }

    async fn read(&self, digest: &str, offset: u64, size: u64) -> Result<Vec<u8>, CallError> {
        let request = ReadContent {
            digest: digest.to_owned(),
            offset: i64::try_from(offset).unwrap_or(i64::MAX),
            size: i64::try_from(size).unwrap_or(i64::MAX),
        };
        let (mut bytes, size) = (Vec::new(), usize::try_from(size).unwrap_or(usize::MAX));
        let mut parts = self.stream::<_, Content>(READ, request).await?;
        while let Some(part) = parts.message().await.map_err(super::failed(READ))? {
            bytes.extend(part.data);
            if bytes.len() >= size {
                break;
            }
        }
        bytes.truncate(size);
        Ok(bytes)
    }
}
