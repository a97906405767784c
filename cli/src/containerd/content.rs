//! Reading of images and of the content store.

use std::collections::HashMap;

use firn_containerd::content::{
    INFO, InfoLabels, InfoResponse, READ, ReadRequest, ReadResponse, UPDATE, UpdateRequest,
};
use firn_containerd::node::{NAMESPACES, NamespacesResponse};
use firn_containerd::{FieldMask, images};
use tonic::{Code, Streaming};

use super::{CallError, Containerd, Image};

/// Largest answer that is taken: lists of images.
pub(super) const MAX_ANSWER: usize = 16 << 20;

/// The next part of a blob; none at its end.
pub async fn next(blob: &mut Streaming<ReadResponse>) -> Result<Option<ReadResponse>, CallError> {
    blob.message().await.map_err(super::failed(READ))
}

impl Containerd {
    /// Names of all namespaces.
    pub async fn namespaces(&self) -> Result<Vec<String>, CallError> {
        let listed: NamespacesResponse = self.call(NAMESPACES, ()).await?;
        Ok(listed
            .namespaces
            .into_iter()
            .map(|namespace| namespace.name)
            .collect())
    }

    /// The images of the connection's namespace.
    pub async fn images(&self) -> Result<Vec<Image>, CallError> {
        let listed: images::ListResponse = self.call(images::LIST, ()).await?;
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
        let got: InfoResponse = self.call(INFO, digest.to_owned()).await?;
        Ok(got.info.unwrap_or_default().size)
    }

    /// Adds labels to a blob.
    pub async fn label_blob(&self, digest: &str, labels: HashMap<String, String>) -> Result<(), CallError> {
        let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
        let info = InfoLabels {
            digest: digest.to_owned(),
            labels,
        };
        let request = UpdateRequest {
            info: Some(info),
            update_mask: Some(FieldMask { paths }),
        };
        self.call(UPDATE, request).await
    }

    /// A whole blob, in parts.
    pub async fn blob(&self, digest: &str) -> Result<Streaming<ReadResponse>, CallError> {
        let request = ReadRequest {
            digest: digest.to_owned(),
            ..ReadRequest::default()
        };
        self.stream(READ, request).await
    }

    async fn read(&self, digest: &str, offset: u64, size: u64) -> Result<Vec<u8>, CallError> {
        let request = ReadRequest {
            digest: digest.to_owned(),
            offset: i64::try_from(offset).unwrap_or(i64::MAX),
            size: i64::try_from(size).unwrap_or(i64::MAX),
        };
        let (mut bytes, size) = (Vec::new(), usize::try_from(size).unwrap_or(usize::MAX));
        let mut parts = self.stream::<_, ReadResponse>(READ, request).await?;
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
