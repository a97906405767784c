//! Images and the content store: what the calls of `firn store gc` need.

use prost::Message;
use tonic::Code;

use super::{CallError, Containerd};

/// Largest answer that is taken: lists of images.
pub(super) const MAX_ANSWER: usize = 16 << 20;

/// `containerd.services.images.v1.Image`
#[derive(Clone, PartialEq, Message)]
pub struct Image {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "3")]
    pub target: Option<Descriptor>,
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
struct Content {
    #[prost(bytes = "vec", tag = "2")]
    data: Vec<u8>,
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

    async fn read(&self, digest: &str, offset: u64, size: u64) -> Result<Vec<u8>, CallError> {
        let call = "/containerd.services.content.v1.Content/Read";
        let request = ReadContent {
            digest: digest.to_owned(),
            offset: i64::try_from(offset).unwrap_or(i64::MAX),
            size: i64::try_from(size).unwrap_or(i64::MAX),
        };
        let (mut bytes, size) = (Vec::new(), usize::try_from(size).unwrap_or(usize::MAX));
        let mut parts = self.stream::<_, Content>(call, request).await?;
        while let Some(part) = parts.message().await.map_err(super::failed(call))? {
            bytes.extend(part.data);
            if bytes.len() >= size {
                break;
            }
        }
        bytes.truncate(size);
        Ok(bytes)
    }
}
