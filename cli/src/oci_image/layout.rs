//! A checkpoint image as a tar file with the layout of OCI, as `ctr images import` takes it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::Path;

use firn_image::form::EntryKind;
use serde_json::json;
use tar::{Archive, EntryType, Header};

use super::{ImageError, Index, Part, media, no_checkpoint};
use crate::archive;
use crate::containerd::Containerd;
use crate::outlet::Outlet;
use crate::steps::Steps;

const LAYOUT: &str = "oci-layout";
const INDEX: &str = "index.json";
const BLOBS: &str = "blobs/sha256/";

/// containerd's annotation with the name that an image gets by its import.
const NAME: &str = "io.containerd.image.name";

/// How much is copied at once.
const CHUNK: usize = 1 << 20;

/// Largest index of a layout.
const MAX_INDEX: u64 = 4 << 20;

/// What a tar file gets.
pub struct Layout<'a> {
    /// Name of the image.
    pub name: &'a str,
    /// The index of the checkpoint.
    pub index: &'a Part,
    /// What has to be there as well.
    pub parts: &'a [Part],
}

impl Layout<'_> {
    /// Each blob once.
    fn blobs(&self) -> Vec<&Part> {
        let mut seen = BTreeSet::new();
        let all = std::iter::once(self.index).chain(self.parts);
        all.filter(|part| seen.insert(&part.digest)).collect()
    }

    pub fn bytes(&self) -> u64 {
        self.blobs().iter().map(|part| part.size).sum()
    }
}

/// Writes a tar file, whose end is for the caller to wait for. Order matters: without the index, which is the
/// last piece, nobody takes the file for a checkpoint. `last` is called before that.
pub async fn write<E: From<ImageError>>(
    containerd: &Containerd,
    layout: &Layout<'_>,
    out: &mut Outlet,
    steps: &mut Steps,
    last: impl AsyncFnOnce() -> Result<(), E>,
) -> Result<u64, E> {
    let bytes = write_blobs(containerd, layout, out, steps).await?;
    last().await?;
    let mut target = layout.index.clone();
    target.platform = None;
    target.annotations = BTreeMap::from([(NAME.to_owned(), layout.name.to_owned())]);
    let index = json!({"schemaVersion": 2, "mediaType": media::INDEX, "manifests": [target]}).to_string();
    let mut end = entry(INDEX, index.as_bytes());
    end.extend([0; 1024]);
    out.write(end)
        .await
        .map_err(ImageError::file("write the archive"))?;
    Ok(bytes)
}

/// All but the index. Returns the bytes of the blobs.
async fn write_blobs(
    containerd: &Containerd,
    layout: &Layout<'_>,
    out: &mut Outlet,
    steps: &mut Steps,
) -> Result<u64, ImageError> {
    let failed = || ImageError::file("write the archive");
    let (blobs, all) = (layout.blobs(), layout.bytes());
    let mut done = 0;
    let version = json!({"imageLayoutVersion": "1.0.0"}).to_string();
    out.write(entry(LAYOUT, version.as_bytes()))
        .await
        .map_err(failed())?;
    for part in blobs {
        let hex = part.digest.trim_start_matches("sha256:");
        let header = header(&format!("{BLOBS}{hex}"), part.size);
        out.write(header.as_bytes().to_vec()).await.map_err(failed())?;
        let mut blob = containerd.blob(&part.digest).await?;
        let mut read = 0;
        while let Some(content) = message(&mut blob).await? {
            read += content.len() as u64;
            done += content.len() as u64;
            out.write(content).await.map_err(failed())?;
            steps.show_copied(done, all);
        }
        if read != part.size {
            let source = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(failed()(source));
        }
        out.write(padding(read)).await.map_err(failed())?;
    }
    Ok(done)
}

async fn message(
    blob: &mut tonic::Streaming<firn_containerd::content::ReadResponse>,
) -> Result<Option<Vec<u8>>, ImageError> {
    let content = crate::containerd::next(blob).await?;
    Ok(content.map(|content| content.data))
}

fn header(name: &str, size: u64) -> Header {
    let mut header = Header::new_gnu();
    // The names are short and constant but for a digest.
    let _fits = header.set_path(name);
    header.set_size(size);
    header.set_mode(0o600);
    header.set_entry_type(EntryType::Regular);
    header.set_cksum();
    header
}

fn entry(name: &str, data: &[u8]) -> Vec<u8> {
    let size = data.len() as u64;
    [header(name, size).as_bytes().as_slice(), data, &padding(size)].concat()
}

/// What follows a file of this size up to a whole block.
fn padding(size: u64) -> Vec<u8> {
    let over = usize::try_from(size % 512).unwrap_or(0);
    vec![0; (512 - over) % 512]
}

/// Reads a tar file into the content store. Returns the index of the checkpoint, whose parts are all there.
pub async fn read(
    containerd: &Containerd,
    what: &str,
    from: impl Read,
    steps: &mut Steps,
) -> Result<(Part, Index), ImageError> {
    let failed = || ImageError::file(format!("read {what}"));
    let (mut entries, mut index, mut done) = (Archive::new(from), None, 0);
    for found in entries.entries().map_err(failed())? {
        let mut found = found.map_err(failed())?;
        if archive::kind(found.header()) != EntryKind::File {
            continue;
        }
        let path = archive::relative(found.path().map_err(failed())?.into_owned());
        let hex = path.strip_prefix(BLOBS).ok().and_then(Path::to_str);
        if let Some(hex) = hex.map(str::to_owned) {
            let digest = format!("sha256:{hex}");
            done += blob(containerd, &digest, &mut found, what, |read| {
                steps.show_copied(done + read, 0)
            })
            .await?;
        } else if path == Path::new(INDEX) {
            let mut text = Vec::new();
            found.take(MAX_INDEX).read_to_end(&mut text).map_err(failed())?;
            if index.replace(text).is_some() {
                return Err(no_checkpoint(what, "it has two index.json"));
            }
        }
    }
    let none = |why: String| no_checkpoint(what, why);
    let index = index.ok_or_else(|| none("it has no index.json, or ends early".to_owned()))?;
    let top: Index = serde_json::from_slice(&index).map_err(|error| none(error.to_string()))?;
    let [part] = &top.manifests[..] else {
        return Err(none("it has several images, or none".to_owned()));
    };
    let index = Index::read(containerd, what, &part.digest).await?;
    for needed in &index.manifests {
        if containerd
            .content(&needed.digest, 0, 1)
            .await
            .is_err_and(|error| error.is_absent())
        {
            return Err(none(format!("{} is missing", needed.digest)));
        }
    }
    Ok((part.clone(), index))
}

/// Writes a file of the archive into the content store.
async fn blob(
    containerd: &Containerd,
    digest: &str,
    from: &mut impl Read,
    what: &str,
    mut progress: impl FnMut(u64),
) -> Result<u64, ImageError> {
    let reference = format!("firn-{}-{digest}", std::process::id());
    let mut upload = containerd.upload(reference).await?;
    let mut all = 0;
    loop {
        let mut chunk = Vec::with_capacity(CHUNK);
        let read = from.by_ref().take(CHUNK as u64).read_to_end(&mut chunk);
        let read = read.map_err(ImageError::file(format!("read {what}")))?;
        if read == 0 {
            break;
        }
        upload.write(chunk).await?;
        all += read as u64;
        progress(all);
    }
    upload.commit(digest, std::collections::HashMap::new()).await?;
    Ok(all)
}
