//! Images in containerd's store, for pods whose annotations name one as their checkpoint.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Instant;

use firn_containerd::images::{self, ImageMessage};
use firn_containerd::node::{self, PluginsResponse};
use firn_containerd::{DecodeError, Message};
use firn_process::blocking::blocking;
use firn_transaction::restore::{FoundImage, ImageStore};

use super::http2::{self, Call};
use super::{METADATA_LIMIT, path};

/// The plugin of the content store, for the filter of a call.
const CONTENT: &str = "type==io.containerd.content.v1";
/// What the content store exports: its directory.
const ROOT: &str = "root";

/// The daemon's images in one of its namespaces.
pub(crate) struct Images<'a> {
    pub address: &'a str,
    pub namespace: &'a str,
}

impl ImageStore for Images<'_> {
    fn find(&self, name: &str) -> Pin<Box<dyn Future<Output = Result<FoundImage, String>> + Send + '_>> {
        let (address, namespace) = (self.address.to_owned(), self.namespace.to_owned());
        let name = name.to_owned();
        let found = blocking(move || find(&address, &namespace, &name));
        Box::pin(async {
            found.await.map_err(|error| match error.kind() {
                // The answer of a call that failed has no message.
                ErrorKind::UnexpectedEof => "there is none".to_owned(),
                _ => error.to_string(),
            })
        })
    }
}

fn find(address: &str, namespace: &str, name: &str) -> io::Result<FoundImage> {
    let call = |method, text: &str| {
        let call = Call {
            method,
            namespace: Some(namespace),
            message: &text.to_owned().encode_to_vec(),
        };
        http2::unary_call(path(address), &call, Instant::now() + METADATA_LIMIT)
    };
    let digest = digest_in(&call(images::GET, name)?)?;
    let store = root_in(&call(node::PLUGINS, CONTENT)?)?;
    let absent = |what| io::Error::new(ErrorKind::InvalidData, what);
    Ok(FoundImage {
        store: store.ok_or_else(|| absent("its content store has no directory of its own"))?,
        digest: digest.ok_or_else(|| absent("the image has no digest"))?,
    })
}

fn digest_in(response: &[u8]) -> Result<Option<String>, DecodeError> {
    let image = ImageMessage::decode(response)?.image.unwrap_or_default();
    let digest = image.target.unwrap_or_default().digest;
    Ok(Some(digest).filter(|digest| !digest.is_empty()))
}

fn root_in(response: &[u8]) -> Result<Option<PathBuf>, DecodeError> {
    let plugins = PluginsResponse::decode(response)?.plugins;
    let root = plugins
        .into_iter()
        .find_map(|mut plugin| plugin.exports.remove(ROOT));
    Ok(root.map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use firn_containerd::Descriptor;
    use firn_containerd::images::Image;
    use firn_containerd::node::Plugin;

    use super::*;

    #[test]
    fn an_images_digest_and_the_stores_directory_are_found() {
        let target = Descriptor {
            digest: "sha256:ab".to_owned(),
            ..Descriptor::default()
        };
        let image = Image {
            target: Some(target),
            ..Image::default()
        };
        let response = ImageMessage { image: Some(image) }.encode_to_vec();
        assert_eq!(digest_in(&response).unwrap().as_deref(), Some("sha256:ab"));
        assert_eq!(digest_in(b"").unwrap(), None);
        digest_in(b"\x0a\x7f").unwrap_err();
        let plugin = |exports: &[(&str, &str)]| {
            let exports = exports
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()));
            Plugin {
                exports: exports.collect(),
            }
        };
        let other = plugin(&[]);
        let content = plugin(&[("other", "/x"), ("root", "/var/lib/c")]);
        let response = |plugins: &[&Plugin]| {
            let plugins = plugins.iter().copied().cloned().collect();
            PluginsResponse { plugins }.encode_to_vec()
        };
        let found = root_in(&response(&[&other, &content])).unwrap();
        assert_eq!(found, Some(PathBuf::from("/var/lib/c")));
        assert_eq!(root_in(&response(&[&other])).unwrap(), None);
    }
}
