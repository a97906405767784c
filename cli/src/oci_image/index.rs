//! The index of a checkpoint image, and the chain of layers of the image that its container began with.

use std::collections::{BTreeMap, HashMap};

use firn_config::names;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{ImageError, media};
use crate::containerd::{Container, Containerd, Descriptor};

/// Annotation of the index: name of the image that the container began with.
const BASE: &str = "org.opencontainers.image.ref.name";
const RUNTIME: &str = "io.containerd.checkpoint.runtime";
const SNAPSHOTTER: &str = "io.containerd.checkpoint.snapshotter";

/// Largest description that is read: indexes, manifests, specs.
pub const MAX_JSON: u64 = 8 << 20;

/// A descriptor of OCI.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    pub media_type: String,
    pub digest: String,
    pub size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<serde_json::Value>,
}

impl Part {
    /// A blob of this machine's platform.
    pub fn here(descriptor: Descriptor) -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self {
            media_type: descriptor.media_type,
            digest: descriptor.digest,
            size: u64::try_from(descriptor.size).unwrap_or(0),
            annotations: BTreeMap::new(),
            platform: Some(serde_json::json!({"architecture": architecture, "os": "linux"})),
        }
    }

    pub fn descriptor(&self) -> Descriptor {
        Descriptor {
            media_type: self.media_type.clone(),
            digest: self.digest.clone(),
            size: i64::try_from(self.size).unwrap_or(i64::MAX),
            annotations: HashMap::new(),
        }
    }
}

fn sha256(data: &[u8]) -> String {
    let digest = Sha256::digest(data);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Bytes with their digest, before they are in the content store.
pub struct Blob {
    pub part: Part,
    pub data: Vec<u8>,
}

impl Blob {
    pub fn new(media_type: &str, data: Vec<u8>) -> Self {
        let size = i64::try_from(data.len()).unwrap_or(i64::MAX);
        let digest = sha256(&data);
        let descriptor = Descriptor {
            media_type: media_type.to_owned(),
            digest,
            size,
            annotations: HashMap::new(),
        };
        let part = Part::here(descriptor);
        Self { part, data }
    }

    /// Writes it, with labels that keep what it names.
    pub async fn upload(&self, containerd: &Containerd, keeps: &[Part]) -> Result<(), ImageError> {
        let reference = format!("firn-{}-{}", std::process::id(), self.part.digest);
        let upload = containerd.upload_all(reference, self.data.clone(), &self.part.digest, labels(keeps));
        Ok(upload.await?)
    }
}

/// containerd keeps what a blob with these labels names.
pub fn labels(keeps: &[Part]) -> HashMap<String, String> {
    let label =
        |(at, part): (usize, &Part)| (format!("containerd.io/gc.ref.content.{at}"), part.digest.clone());
    keeps.iter().enumerate().map(label).collect()
}

/// The index of a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    pub schema_version: u32,
    #[serde(default)]
    pub manifests: Vec<Part>,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

impl Index {
    /// `below`: the snapshot that the container's own began with.
    pub fn new(container: &Container, below: &str, manifests: Vec<Part>) -> Self {
        let runtime = container.runtime.as_ref().map_or("", |runtime| &runtime.name);
        let annotations = [
            (BASE, &*container.image),
            (RUNTIME, runtime),
            (SNAPSHOTTER, &container.snapshotter),
            (names::ANNOTATION_CONTAINER, &container.id),
        ];
        // A snapshot of another name is no image's.
        let chain = is_chain(below).then_some((names::ANNOTATION_BASE_CHAIN, below));
        let annotations = annotations.into_iter().chain(chain);
        Self {
            schema_version: 2,
            manifests,
            annotations: annotations
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        }
    }

    /// Reads the index of `what` from the content store.
    pub async fn read(containerd: &Containerd, what: &str, digest: &str) -> Result<Self, ImageError> {
        let bytes = containerd.content(digest, 0, MAX_JSON).await?;
        Self::parse(what, digest, &bytes)
    }

    /// Reads the bytes of an index.
    pub fn parse(what: &str, digest: &str, bytes: &[u8]) -> Result<Self, ImageError> {
        let index: Self = parse(what, digest, bytes)?;
        for (needed, name) in [(media::CHECKPOINT, "processes"), (media::SPEC, "spec")] {
            if index.part(needed).is_none() {
                return Err(no_checkpoint(what, format!("it has no {name}")));
            }
        }
        for needed in [BASE, RUNTIME, SNAPSHOTTER] {
            if !index.annotations.contains_key(needed) {
                return Err(no_checkpoint(
                    what,
                    format!("its index has no annotation {needed}"),
                ));
            }
        }
        Ok(index)
    }

    /// The part of this type.
    pub fn part(&self, media_type: &str) -> Option<&Part> {
        self.manifests.iter().find(|part| part.media_type == media_type)
    }

    pub fn base(&self) -> &str {
        self.annotations.get(BASE).map_or("", String::as_str)
    }

    /// Chain id of the base's layers, where firn has made the checkpoint.
    pub fn base_chain(&self) -> Option<&str> {
        self.annotations
            .get(names::ANNOTATION_BASE_CHAIN)
            .map(String::as_str)
    }

    pub fn runtime(&self) -> &str {
        self.annotations.get(RUNTIME).map_or("", String::as_str)
    }

    pub fn snapshotter(&self) -> &str {
        self.annotations.get(SNAPSHOTTER).map_or("", String::as_str)
    }

    /// Id of the container, where firn has made the checkpoint.
    pub fn container(&self) -> Option<&str> {
        self.annotations
            .get(names::ANNOTATION_CONTAINER)
            .map(String::as_str)
    }

    pub fn bytes(&self) -> u64 {
        self.manifests.iter().map(|part| part.size).sum()
    }
}

pub fn no_checkpoint(what: &str, why: impl Into<String>) -> ImageError {
    ImageError::NoCheckpoint {
        what: what.to_owned(),
        why: why.into(),
    }
}

async fn json<T: serde::de::DeserializeOwned>(
    containerd: &Containerd,
    what: &str,
    digest: &str,
) -> Result<T, ImageError> {
    let bytes = containerd.content(digest, 0, MAX_JSON).await?;
    parse(what, digest, &bytes)
}

fn parse<T: serde::de::DeserializeOwned>(what: &str, digest: &str, bytes: &[u8]) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|error| no_checkpoint(what, format!("{digest}: {error}")))
}

/// The image that a container began with.
pub struct BaseImage {
    /// That of containerd's image.
    pub name: String,
    /// Name of the snapshot with all of its layers.
    pub chain: String,
    /// Layers from the lowest on.
    pub layers: Vec<Layer>,
    /// Everything that has to be copied to have the image elsewhere.
    pub parts: Vec<Part>,
}

/// A layer of an image.
pub struct Layer {
    pub part: Part,
    /// Digest of its content, unpacked, as the image's configuration has it.
    pub diff_id: String,
    /// Name of the snapshot that it completes.
    pub chain: String,
}

#[derive(Deserialize)]
struct Described {
    #[serde(default)]
    manifests: Vec<Part>,
    config: Option<Part>,
    #[serde(default)]
    layers: Vec<Part>,
}

#[derive(Deserialize)]
struct Config {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

impl BaseImage {
    /// The image of this machine's platform below a descriptor.
    pub async fn read(containerd: &Containerd, name: &str, target: Part) -> Result<Self, ImageError> {
        let own = Part::here(Descriptor::default()).platform;
        let mut parts = vec![target.clone()];
        let mut described: Described = json(containerd, name, &target.digest).await?;
        if described.config.is_none() {
            let fits = |part: &&Part| match (&part.platform, &own) {
                (Some(part), Some(own)) => ["os", "architecture"].iter().all(|key| part[*key] == own[*key]),
                _ => true,
            };
            let here = described.manifests.iter().find(fits).cloned();
            let here = here.ok_or_else(|| no_checkpoint(name, "the image has nothing for this platform"))?;
            described = json(containerd, name, &here.digest).await?;
            parts.push(here);
        }
        let config = described
            .config
            .ok_or_else(|| no_checkpoint(name, "the image has no configuration"))?;
        let read: Config = json(containerd, name, &config.digest).await?;
        parts.push(config);
        parts.extend(described.layers.iter().cloned());
        let diff_ids = read.rootfs.diff_ids;
        let chains = chains(&diff_ids);
        if chains.len() != described.layers.len() {
            return Err(no_checkpoint(
                name,
                "the image has not as many layers as its configuration",
            ));
        }
        let layers = described.layers.into_iter().zip(diff_ids).zip(&chains);
        let layer = |((part, diff_id), chain): ((Part, String), &String)| Layer {
            part,
            diff_id,
            chain: chain.clone(),
        };
        Ok(Self {
            name: name.to_owned(),
            chain: chains.last().cloned().unwrap_or_default(),
            layers: layers.map(layer).collect(),
            parts,
        })
    }
}

impl BaseImage {
    /// Digest of its configuration.
    pub fn config(&self) -> &str {
        &self.parts[self.parts.len() - 1 - self.layers.len()].digest
    }

    /// The blobs that name others, each with those.
    pub fn keeps(&self) -> Vec<(&str, &[Part])> {
        // From the target down to the manifest, then what the manifest names.
        let manifest = self.parts.len() - 1 - self.layers.len();
        let above = (0..manifest - 1).map(|at| (&*self.parts[at].digest, &self.parts[at + 1..=at + 1]));
        let own = (&*self.parts[manifest - 1].digest, &self.parts[manifest..]);
        above.chain([own]).collect()
    }
}

/// The name that firn gives the image with these layers where its own name leads to another one.
pub fn own_name(chain: &str) -> Option<String> {
    let hex = chain.strip_prefix("sha256:").filter(|_| is_chain(chain))?;
    Some(format!("localhost/firn/base:{}", &hex[..12]))
}

/// Whether a snapshot has the name of an image's layers.
pub fn is_chain(snapshot: &str) -> bool {
    snapshot
        .strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The chain ids of OCI's image specification, from the lowest layer on.
fn chains(diff_ids: &[String]) -> Vec<String> {
    let mut chains: Vec<String> = Vec::new();
    for id in diff_ids {
        let chain = match chains.last() {
            None => id.clone(),
            Some(below) => sha256(format!("{below} {id}").as_bytes()),
        };
        chains.push(chain);
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_those_of_the_specification() {
        let ids = ["sha256:aa", "sha256:bb"].map(str::to_owned);
        let chains = chains(&ids);
        assert_eq!(chains[0], "sha256:aa");
        // echo -n "sha256:aa sha256:bb" | sha256sum
        assert_eq!(
            chains[1],
            "sha256:b68ad689d6d1ec110ea1c13617437ad6f3766d4b3b309f6a603a222e07a0164f"
        );
    }
}
