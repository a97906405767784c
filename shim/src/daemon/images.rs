//! Images in containerd's store, for pods whose annotations name one as their checkpoint.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Instant;

use firn_process::blocking::blocking;
use firn_transaction::restore::{FoundImage, ImageStore};
use protobuf::Message;
use protobuf::well_known_types::empty::Empty;
use protobuf::well_known_types::wrappers::StringValue;

use super::http2::{self, Call};
use super::{METADATA_LIMIT, bytes, messages, path};
use crate::options::unknown_string;

const IMAGE: &str = "/containerd.services.images.v1.Images/Get";
const PLUGINS: &str = "/containerd.services.introspection.v1.Introspection/Plugins";
const CONTENT: &str = "type==io.containerd.content.v1";
/// Field 1 of `GetImageResponse`: the image. Field 3 of that: its target, whose field 2 is the digest.
const IMAGE_FIELD: u32 = 1;
const TARGET_FIELD: u32 = 3;
const DIGEST_FIELD: u32 = 2;
/// Field 1 of `PluginsResponse`: plugins. Field 5 of one: what it exports, as pairs of fields 1 and 2.
const PLUGINS_FIELD: u32 = 1;
const EXPORTS_FIELD: u32 = 5;
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
        // The requests have one field, which is that of a StringValue.
        let request = StringValue {
            value: text.to_owned(),
            ..StringValue::default()
        };
        let call = Call {
            method,
            namespace: Some(namespace),
            message: &request.write_to_bytes()?,
        };
        http2::unary_call(path(address), &call, Instant::now() + METADATA_LIMIT)
    };
    let digest = digest_in(&call(IMAGE, name)?)?;
    let store = root_in(&call(PLUGINS, CONTENT)?)?;
    let absent = |what| io::Error::new(ErrorKind::InvalidData, what);
    Ok(FoundImage {
        store: store.ok_or_else(|| absent("its content store has no directory of its own"))?,
        digest: digest.ok_or_else(|| absent("the image has no digest"))?,
    })
}

fn digest_in(response: &[u8]) -> protobuf::Result<Option<String>> {
    let image = messages(&Empty::parse_from_bytes(response)?, IMAGE_FIELD)?.pop();
    let target = messages(&image.unwrap_or_default(), TARGET_FIELD)?.pop();
    let digest = String::from_utf8(bytes(&target.unwrap_or_default(), DIGEST_FIELD));
    Ok(digest.ok().filter(|digest| !digest.is_empty()))
}

fn root_in(response: &[u8]) -> protobuf::Result<Option<PathBuf>> {
    for plugin in messages(&Empty::parse_from_bytes(response)?, PLUGINS_FIELD)? {
        for export in messages(&plugin, EXPORTS_FIELD)? {
            if unknown_string(&export, 1) == ROOT {
                return Ok(Some(unknown_string(&export, 2).into()));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::push;
    use super::*;

    fn message(fields: &[(u32, &[u8])]) -> Vec<u8> {
        let mut message = Empty::new();
        for (field, bytes) in fields {
            push(&mut message, *field, bytes);
        }
        message.write_to_bytes().unwrap()
    }

    #[test]
    fn an_images_digest_and_the_stores_directory_are_found() {
        let target = message(&[(1, b"type"), (2, b"sha256:ab")]);
        let image = message(&[(1, b"r.example/warm:1"), (3, &target)]);
        let response = message(&[(1, &image)]);
        assert_eq!(digest_in(&response).unwrap().as_deref(), Some("sha256:ab"));
        assert_eq!(digest_in(b"").unwrap(), None);
        digest_in(b"\x0a\x7f").unwrap_err();
        let export = |key: &str, value: &str| message(&[(1, key.as_bytes()), (2, value.as_bytes())]);
        let other = message(&[(1, b"io.containerd.content.v1"), (2, b"proxied")]);
        let content = message(&[
            (2, b"content"),
            (5, &export("other", "/x")),
            (5, &export("root", "/var/lib/c")),
        ]);
        let response = message(&[(1, &other), (1, &content)]);
        assert_eq!(root_in(&response).unwrap(), Some(PathBuf::from("/var/lib/c")));
        assert_eq!(root_in(&message(&[(1, &other)])).unwrap(), None);
    }
}
