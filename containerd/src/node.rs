//! What the daemon reports of itself: its version, namespaces and plugins.

use std::collections::HashMap;

use prost::Message;

/// Nothing gives a [`VersionResponse`].
pub const VERSION: &str = "/containerd.services.version.v1.Version/Version";
/// Nothing gives a [`NamespacesResponse`].
pub const NAMESPACES: &str = "/containerd.services.namespaces.v1.Namespaces/List";
/// A filter gives a [`PluginsResponse`].
pub const PLUGINS: &str = "/containerd.services.introspection.v1.Introspection/Plugins";

#[derive(Clone, PartialEq, Message)]
pub struct VersionResponse {
    #[prost(string, tag = "1")]
    pub version: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Namespace {
    #[prost(string, tag = "1")]
    pub name: String,
}

/// `ListNamespacesResponse`
#[derive(Clone, PartialEq, Message)]
pub struct NamespacesResponse {
    #[prost(message, repeated, tag = "1")]
    pub namespaces: Vec<Namespace>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Plugin {
    #[prost(map = "string, string", tag = "5")]
    pub exports: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PluginsResponse {
    #[prost(message, repeated, tag = "1")]
    pub plugins: Vec<Plugin>,
}
