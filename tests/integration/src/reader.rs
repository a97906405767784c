//! Reads checkpoint images by docs/reference/image-format.md and docs/reference/store.md, and by nothing else
//! of firn: what is not on these pages, it does not know.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use aes_gcm_siv::aead::AeadInPlace;
use aes_gcm_siv::{Aes256GcmSiv, KeyInit};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Capabilities that this reader has.
const NEEDS: [&str; 6] = [
    "nvidia",
    "device-free",
    "inherited-gpus",
    "stored-memory",
    "blake3",
    "interposed",
];

/// Files from this size on have another checksum.
const LARGE: u64 = 1 << 20;
/// Bytes of a block, and of an extent.
const BLOCK: u64 = 4 << 20;

/// Checks a checkpoint in a directory, and what it has in the store at `store`, of which `key` is the file of
/// the key. False: it has no manifest.
pub fn check(dir: &Path, store: &Path, key: Option<&Path>) -> Result<bool> {
    let path = dir.join("firn.json");
    if !path.exists() {
        return Ok(false);
    }
    ensure!(fs::symlink_metadata(&path)?.is_file(), "firn.json is no file");
    let text = fs::read_to_string(&path)?;
    ensure!(text.len() <= 4 << 20, "firn.json has {} bytes", text.len());
    let body = envelope(&text).context("firn.json")?;
    files(dir, &body)?;
    if !body["bulk"].is_null() {
        compare_stored(store, key, &body["bulk"]).context("memory in the store")?;
    }
    Ok(true)
}

/// The body, once everything else fits.
fn envelope(text: &str) -> Result<Value> {
    let head: Value = serde_json::from_str(text)?;
    ensure!(head["format"] == "firn-checkpoint", "format {}", head["format"]);
    ensure!(head["major"] == 1, "major {}", head["major"]);
    let needs: Vec<&str> = list(&head["needs"])?.iter().filter_map(Value::as_str).collect();
    ensure!(needs.iter().all(|need| NEEDS.contains(need)), "needs {needs:?}");
    let (_, body) = text.split_once(",\"body\":").context("no body")?;
    let body = body.trim_end().strip_suffix('}').context("no end")?;
    ensure!(head["sha256"] == hex(&Sha256::digest(body)), "another body");
    let body: Value = serde_json::from_str(body)?;
    for (need, is_there) in [
        ("nvidia", body["backend"] == "nvidia"),
        ("device-free", !body["released_gpus"].is_null()),
        ("inherited-gpus", !body["inherited_gpus"].is_null()),
        ("stored-memory", !body["bulk"].is_null()),
        (
            "blake3",
            list(&body["images"])?
                .iter()
                .any(|image| !image["blake3"].is_null()),
        ),
        (
            "interposed",
            list(&body["images"])?
                .iter()
                .any(|image| image["name"] == "cuda-library.img"),
        ),
    ] {
        ensure!(needs.contains(&need) == is_there, "need {need} with {body}");
    }
    Ok(body)
}

/// Every file that is described is there, and no other.
fn files(dir: &Path, body: &Value) -> Result<()> {
    let images = list(&body["images"])?;
    for image in images {
        let name = image["name"].as_str().context("a file without name")?;
        let path = dir.join(name);
        let size = image["size"].as_u64().context("a file without size")?;
        ensure!(fs::symlink_metadata(&path)?.is_file(), "{name} is no file");
        ensure!(fs::metadata(&path)?.len() == size, "{name} has another size");
        let (field, sum) = match size < LARGE {
            true => ("sha256", hex(&Sha256::digest(fs::read(&path)?))),
            false if image["blake3"].is_null() => ("sha256_of_blocks", of_blocks(&path)?),
            false => ("blake3", blake3_of(&path)?),
        };
        ensure!(image[field] == sum, "{name}: {field} is {}", image[field]);
    }
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let is_listed = images.iter().any(|image| image["name"] == *name);
        let is_read = name.ends_with(".img") || name == "descriptors.json" || name == "parent";
        ensure!(is_listed || !is_read, "{name} is not described");
    }
    Ok(())
}

fn of_blocks(path: &Path) -> Result<String> {
    let (mut file, mut all) = (File::open(path)?, Sha256::new());
    loop {
        let mut block = Vec::new();
        (&mut file).take(BLOCK).read_to_end(&mut block)?;
        if block.is_empty() {
            return Ok(hex(&all.finalize()));
        }
        all.update(Sha256::digest(&block));
    }
}

fn blake3_of(path: &Path) -> Result<String> {
    let mut sum = blake3::Hasher::new();
    sum.update_reader(File::open(path)?)?;
    Ok(sum.finalize().to_string())
}

/// A store, and how it writes its files.
struct Shelf<'a> {
    dir: &'a Path,
    is_framed: bool,
    /// For names and for content.
    keys: Option<[[u8; 32]; 2]>,
}

impl<'a> Shelf<'a> {
    fn open(dir: &'a Path, key: Option<&Path>, id: &Value) -> Result<Self> {
        let description: Value = serde_json::from_slice(&fs::read(dir.join("firn-store.json"))?)?;
        ensure!(description["format"] == "firn-store", "{description}");
        ensure!(description["id"] == *id, "it is in another store");
        let is_framed = match description["version"].as_u64() {
            Some(1) => false,
            Some(2) => true,
            _ => bail!("{description}"),
        };
        let keys = match (&description["key"], key) {
            (Value::Null, _) => None,
            (check, key) => {
                let key = fs::read_to_string(key.context("no key")?)?;
                let mut material = bytes_of(key.trim())?;
                material.extend(id.as_str().context("no id")?.bytes());
                let key = |context| blake3::derive_key(context, &material);
                let own = hex(&key("firn-store 2026-11 which key it is")[..8]);
                ensure!(*check == own, "another key");
                Some([
                    key("firn-store 2026-11 names of extents"),
                    key("firn-store 2026-11 content of extents and indexes"),
                ])
            }
        };
        Ok(Self { dir, is_framed, keys })
    }

    /// What a file below the store has, whose name is this digest.
    fn read(&self, path: &str, name: &str, most: usize) -> Result<Vec<u8>> {
        let mut bytes = fs::read(self.dir.join(path))?;
        if let Some([_, content]) = self.keys {
            let tag = bytes.split_off(bytes.len().checked_sub(16).context("no tag")?);
            let (tag, nonce): ([u8; 16], [u8; 12]) = match (tag.try_into(), bytes_of(&name[..24])?.try_into())
            {
                (Ok(tag), Ok(nonce)) => (tag, nonce),
                _ => bail!("sizes"),
            };
            let cipher = Aes256GcmSiv::new(&content.into());
            let opened =
                cipher.decrypt_in_place_detached(&nonce.into(), path.as_bytes(), &mut bytes, &tag.into());
            ensure!(opened.is_ok(), "{path} is not what was written");
        }
        match (self.is_framed, bytes.first()) {
            (false, _) => Ok(bytes),
            (true, Some(0)) => Ok(bytes.split_off(1)),
            (true, Some(1)) => Ok(zstd::bulk::decompress(&bytes[1..], most)?),
            _ => bail!("{path} begins with no 0 or 1"),
        }
    }

    fn extent(&self, name: &Value, length: u64) -> Result<()> {
        if name.is_null() {
            return Ok(());
        }
        let digest = name.as_str().filter(|name| name.len() == 64).context("a name")?;
        let name = match self.keys {
            Some([names, _]) => blake3::keyed_hash(&names, &bytes_of(digest)?).to_string(),
            None => digest.to_owned(),
        };
        let bytes = self.read(&format!("extents/{}/{name}", &name[..2]), &name, 4 << 20)?;
        ensure!(bytes.len() as u64 == length, "extent {name} has {}", bytes.len());
        ensure!(
            *blake3::hash(&bytes).to_hex() == *digest,
            "extent {name} is another"
        );
        Ok(())
    }
}

fn bytes_of(digits: &str) -> Result<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    pairs.map(byte).collect()
}

/// Every extent that the image's index names is there, and is what its name stands for.
fn compare_stored(store: &Path, key: Option<&Path>, bulk: &Value) -> Result<()> {
    let store = Shelf::open(store, key, &bulk["store"])?;
    let name = bulk["index"].as_str().context("no index")?;
    let bytes = store.read(&format!("images/{name}"), name, 64 << 20)?;
    ensure!(*blake3::hash(&bytes).to_hex() == *name, "index {name} is another");
    let index: Value = serde_json::from_slice(&bytes)?;
    ensure!(
        index["format"] == "firn-store-index" && index["version"] == 1,
        "format of the index"
    );
    let mut bytes = 0;
    for piece in list(&index["index"]["pieces"])? {
        let length = piece["length"].as_u64().context("a range without length")?;
        ensure!(piece["pid"].as_i64() > Some(0) && length > 0, "range {piece}");
        let extents = list(&piece["extents"])?;
        ensure!(
            extents.len() as u64 == length.div_ceil(BLOCK),
            "{} extents",
            extents.len()
        );
        for (at, name) in (0..length).step_by(1 << 22).zip(extents) {
            store.extent(name, (length - at).min(BLOCK))?;
        }
        bytes += length;
    }
    ensure!(bulk["bytes"] == bytes, "{bytes} bytes in all");
    Ok(())
}

fn list(value: &Value) -> Result<&[Value]> {
    match value {
        Value::Array(all) => Ok(all),
        other => bail!("{other} is no list"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tempfile::TempDir;

    use super::*;

    /// An image with a small and a large file, and a store with one extent and one that is zero.
    fn made() -> (TempDir, TempDir) {
        let (image, store) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let large = vec![7; (5 << 20) + 3];
        fs::write(image.path().join("pages-1.img"), &large).unwrap();
        fs::write(image.path().join("pstree.img"), "tree").unwrap();
        let extent = blake3::hash(&large[..4 << 20]).to_hex();
        let length: u64 = 8 << 20;
        let index = json!({"format": "firn-store-index", "version": 1, "index": {"pieces": [
            {"pid": 1, "address": 4096, "length": length, "extents": [extent.as_str(), null]}]}});
        let index = index.to_string();
        let name = blake3::hash(index.as_bytes()).to_hex();
        let shelf = store.path().join("extents").join(&extent[..2]);
        fs::create_dir_all(&shelf).unwrap();
        fs::create_dir(store.path().join("images")).unwrap();
        fs::write(shelf.join(extent.as_str()), &large[..4 << 20]).unwrap();
        fs::write(store.path().join("images").join(name.as_str()), index).unwrap();
        let description = r#"{"format":"firn-store","version":1,"id":"here"}"#;
        fs::write(store.path().join("firn-store.json"), description).unwrap();
        let body = json!({"backend": "nvidia",
            "bulk": {"store": "here", "index": name.as_str(), "bytes": length}, "images": [
            {"name": "pages-1.img", "size": large.len(), "blake3": blake3::hash(&large).to_string()},
            {"name": "pstree.img", "size": 4, "sha256": hex(&Sha256::digest("tree"))}]});
        let body = body.to_string();
        let manifest = format!(
            "{{\"format\":\"firn-checkpoint\",\"major\":1,\"minor\":0,\
             \"needs\":[\"nvidia\",\"stored-memory\",\"blake3\"],\"sha256\":\"{}\",\"body\":{body}}}",
            hex(&Sha256::digest(&body))
        );
        fs::write(image.path().join("firn.json"), manifest).unwrap();
        (image, store)
    }

    /// Replaces the first such text of a file.
    fn edit(file: &Path, from: &str, to: &str) {
        let text = fs::read_to_string(file).unwrap();
        assert!(text.contains(from), "{from} in {text}");
        fs::write(file, text.replacen(from, to, 1)).unwrap();
    }

    #[test]
    fn an_image_is_what_the_documents_describe() {
        let (image, store) = made();
        assert!(check(image.path(), store.path(), None).unwrap());
        let none = TempDir::new().unwrap();
        assert!(!check(none.path(), store.path(), None).unwrap());
    }

    #[test]
    fn everything_else_is_an_error() {
        type Damage = fn(&Path, &Path);
        let damages: [Damage; 9] = [
            |image, _| edit(&image.join("firn.json"), "firn-checkpoint", "other"),
            |image, _| edit(&image.join("firn.json"), "\"nvidia\"", "\"news\""),
            |image, _| edit(&image.join("firn.json"), "\"here\"", "\"hers\""),
            |image, _| fs::write(image.join("pstree.img"), "trees").unwrap(),
            |image, _| fs::write(image.join("pstree.img"), "true").unwrap(),
            |image, _| fs::write(image.join("more.img"), "").unwrap(),
            |image, _| {
                let mut large = vec![7; (5 << 20) + 3];
                large[5 << 20] = 8;
                fs::write(image.join("pages-1.img"), large).unwrap();
            },
            |_, store| edit(&store.join("firn-store.json"), "here", "hers"),
            |_, store| fs::remove_dir_all(store.join("extents")).unwrap(),
        ];
        for (number, damage) in damages.iter().enumerate() {
            let (image, store) = made();
            damage(image.path(), store.path());
            assert!(
                check(image.path(), store.path(), None).is_err(),
                "damage {number} is not found"
            );
        }
    }
}
