//! Writing into the content store.

use std::collections::HashMap;

use firn_containerd::content::{WRITE, WriteRequest, action};
use futures_util::stream;
use tokio::sync::mpsc;
use tonic::Streaming;

use super::{CallError, Containerd, failed};

/// A blob that is being written.
pub struct Upload {
    messages: mpsc::Sender<WriteRequest>,
    answers: Streaming<()>,
    next: WriteRequest,
}

impl Upload {
    /// Adds to the blob.
    pub async fn write(&mut self, data: Vec<u8>) -> Result<(), CallError> {
        let length = i64::try_from(data.len()).unwrap_or(i64::MAX);
        let message = WriteRequest {
            action: action::WRITE,
            data,
            ..self.next.clone()
        };
        self.next.offset += length;
        self.send(message).await
    }

    /// The blob is complete and has this digest, or all of it is lost. One that is there already stays.
    pub async fn commit(mut self, digest: &str, labels: HashMap<String, String>) -> Result<(), CallError> {
        let message = WriteRequest {
            action: action::COMMIT,
            expected: digest.to_owned(),
            total: self.next.offset,
            labels,
            ..self.next.clone()
        };
        match self.send(message).await {
            Err(error) if error.is_there() => Ok(()),
            sent => sent,
        }
    }

    async fn send(&mut self, message: WriteRequest) -> Result<(), CallError> {
        // Nobody receives it if the call has failed: then the answer has the reason.
        let _failed = self.messages.send(message).await;
        self.answers.message().await.map_err(failed(WRITE)).map(drop)
    }
}

impl Containerd {
    /// Begins a blob. `reference` distinguishes it from others that are being written.
    pub async fn upload(&self, reference: String) -> Result<Upload, CallError> {
        let next = WriteRequest {
            action: action::STAT,
            reference,
            ..WriteRequest::default()
        };
        let (messages, receiver) = mpsc::channel(1);
        // Order matters: containerd answers the call once the first message is there.
        let _open = messages.send(next.clone()).await;
        let requests = stream::unfold(receiver, async |mut receiver| {
            let message = receiver.recv().await?;
            Some((message, receiver))
        });
        let mut answers = self.converse(WRITE, requests).await?;
        answers.message().await.map_err(failed(WRITE))?;
        Ok(Upload {
            messages,
            answers,
            next,
        })
    }

    /// Writes a small blob as a whole.
    pub async fn upload_all(
        &self,
        reference: String,
        data: Vec<u8>,
        digest: &str,
        labels: HashMap<String, String>,
    ) -> Result<(), CallError> {
        let mut upload = self.upload(reference).await?;
        upload.write(data).await?;
        upload.commit(digest, labels).await
    }
}
