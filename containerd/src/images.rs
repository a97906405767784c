//! `containerd.services.images.v1`

use std::collections::HashMap;

use prost::Message;

use crate::types::{Descriptor, Timestamp};

/// A name gives an [`ImageMessage`].
pub const GET: &str = "/containerd.services.images.v1.Images/Get";
/// Nothing gives a [`ListResponse`].
pub const LIST: &str = "/containerd.services.images.v1.Images/List";
/// An [`ImageMessage`].
pub const CREATE: &str = "/containerd.services.images.v1.Images/Create";
/// A [`DeleteRequest`].
pub const DELETE: &str = "/containerd.services.images.v1.Images/Delete";

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

/// `GetImageResponse`, and also `CreateImageRequest`
#[derive(Clone, PartialEq, Message)]
pub struct ImageMessage {
    #[prost(message, optional, tag = "1")]
    pub image: Option<Image>,
}

/// `ListImagesResponse`
#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub images: Vec<Image>,
}

/// `DeleteImageRequest`
#[derive(Clone, PartialEq, Message)]
pub struct DeleteRequest {
    #[prost(string, tag = "1")]
    pub name: String,
    /// The answer comes once what the image alone has kept is gone.
    #[prost(bool, tag = "2")]
    pub sync: bool,
    #[prost(message, optional, tag = "3")]
    pub target: Option<Descriptor>,
}
