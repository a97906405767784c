//! Records of images.

use prost::Message;

use super::{CallError, Containerd, Descriptor, Image};

/// `GetImageResponse`, and also `CreateImageRequest`
#[derive(Clone, PartialEq, Message)]
struct One {
    #[prost(message, optional, tag = "1")]
    image: Option<Image>,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteImage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bool, tag = "2")]
    sync: bool,
    #[prost(message, optional, tag = "3")]
    target: Option<Descriptor>,
}

impl Containerd {
    /// None: there is none of this name.
    pub async fn image(&self, name: &str) -> Result<Option<Image>, CallError> {
        let call = "/containerd.services.images.v1.Images/Get";
        match self.call::<_, One>(call, name.to_owned()).await {
            Err(error) if error.is_absent() => Ok(None),
            got => Ok(got?.image),
        }
    }

    /// Fails if there is one of this name.
    pub async fn create_image(&self, image: Image) -> Result<(), CallError> {
        let call = "/containerd.services.images.v1.Images/Create";
        self.call(call, One { image: Some(image) }).await
    }

    /// Removes the record, and what it alone has kept.
    pub async fn delete_image(&self, name: &str) -> Result<(), CallError> {
        self.delete_target(name, None).await
    }

    /// Only the image with this target. containerd 1.7 does not look at it.
    pub async fn delete_target(&self, name: &str, target: Option<Descriptor>) -> Result<(), CallError> {
        let call = "/containerd.services.images.v1.Images/Delete";
        let (name, sync) = (name.to_owned(), true);
        self.call(call, DeleteImage { name, sync, target }).await
    }
}
