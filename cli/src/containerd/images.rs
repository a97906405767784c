//! Records of images.

use firn_containerd::images::{CREATE, DELETE, DeleteRequest, GET, ImageMessage};

use super::{CallError, Containerd, Descriptor, Image};

impl Containerd {
    /// None: there is none of this name.
    pub async fn image(&self, name: &str) -> Result<Option<Image>, CallError> {
        match self.call::<_, ImageMessage>(GET, name.to_owned()).await {
            Err(error) if error.is_absent() => Ok(None),
            got => Ok(got?.image),
        }
    }

    /// Fails if there is one of this name.
    pub async fn create_image(&self, image: Image) -> Result<(), CallError> {
        let image = Some(image);
        self.call(CREATE, ImageMessage { image }).await
    }

    /// Removes the record, and what it alone has kept.
    pub async fn delete_image(&self, name: &str) -> Result<(), CallError> {
        self.delete_target(name, None).await
    }

    /// Only the image with this target. containerd 1.7 does not look at it.
    pub async fn delete_target(&self, name: &str, target: Option<Descriptor>) -> Result<(), CallError> {
        let (name, sync) = (name.to_owned(), true);
        self.call(DELETE, DeleteRequest { name, sync, target }).await
    }
}
