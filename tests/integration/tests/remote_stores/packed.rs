//! Stores in buckets that are compressed and encrypted.

use std::fs;

use anyhow::{Result, ensure};
use firn_store::{Digest, Packing, Store};

use crate::remote_stores::{EXTENTS, Lab, OBJECTS, SIZE, URL};

/// Keys in files that are the user's alone, and their paths.
fn keys(lab: &Lab) -> Result<[String; 2]> {
    use std::os::unix::fs::PermissionsExt;
    let file = |digit: &str| {
        let path = lab.dir.path().join(format!("key-{digit}"));
        fs::write(&path, digit.repeat(64))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        anyhow::Ok(path.display().to_string())
    };
    Ok([file("a")?, file("b")?])
}

/// Who reads the bucket sees neither memory nor names of containers; who has the key gets all of it.
pub fn an_encrypted_bucket_shows_nothing_without_its_key() -> Result<()> {
    let lab = Lab::new()?;
    let [key, other] = keys(&lab)?;
    let push = ["push", "--key", &key, "--compress", URL];
    let pushed = lab.json("a", &push)?;
    ensure!(pushed["copied"][0]["written"] == EXTENTS * SIZE, "{pushed}");
    let again = lab.json("a", &push)?;
    ensure!(again["copied"][0]["written"] == 0, "{again}");

    let digests = Store::open(&lab.dir.path().join("a"), &Packing::default())?.extents()?;
    let seeds = (0..EXTENTS).map(|number| Digest::of(&number.to_ne_bytes()).to_string());
    let secrets: Vec<String> = digests.keys().map(Digest::to_string).chain(seeds).collect();
    let mut size = 0;
    for name in lab.objects()? {
        let content = fs::read(lab.gateway.file(OBJECTS).join(&name))?;
        size += content.len();
        let text = format!("{name} {}", String::from_utf8_lossy(&content));
        let shown = secrets.iter().find(|secret| text.contains(*secret));
        ensure!(
            shown.is_none() && !text.contains("train"),
            "{name} shows {shown:?}"
        );
    }
    ensure!(size < EXTENTS * SIZE / 10, "{size} bytes are there");

    let id = lab.id.to_string();
    for wrong in [
        &["pull", URL, &id][..],
        &["pull", "--key", &other, URL, &id],
        &["ls", "--store", URL],
    ] {
        lab.fails("b", wrong, "FIRN-STORE-KEY", &[URL])?;
    }
    lab.fails("a", &["push", URL], "FIRN-STORE-KEY", &[URL, "is encrypted"])?;
    let verify = ["verify", "--store", URL, "--store-key", &key];
    ensure!(lab.done("a", &verify)?.ends_with("whole\n"));
    let listed = lab.json("a", &["ls", "--store", URL, "--store-key", &key])?;
    ensure!(listed["images"][0]["state"] == "complete", "{listed}");
    lab.done("b", &["pull", "--key", &key, URL, &id])?;
    lab.same()?;

    // One extent in the place of another.
    let objects = lab.objects()?;
    let mut extents = objects.iter().filter(|name| name.starts_with("extents/"));
    if let (Some(first), Some(second)) = (extents.next(), extents.next()) {
        let file = |name: &str| lab.gateway.file(OBJECTS).join(name);
        fs::copy(file(second), file(first))?;
        fs::remove_dir_all(lab.dir.path().join("b"))?;
        lab.fails(
            "b",
            &["pull", "--key", &key, URL, &id],
            "FIRN-STORE-DAMAGED",
            &[first],
        )?;
        let found = lab.firn("a", &verify)?;
        ensure!(
            found.status.code() == Some(1),
            "{}",
            crate::remote_stores::all(&found)
        );
    }
    Ok(())
}

/// Also into a directory; and a store stays what it is.
pub fn a_store_is_packed_from_its_beginning_or_never() -> Result<()> {
    let lab = Lab::new()?;
    let [key, _] = keys(&lab)?;
    let dir = lab.dir.path().join("shared").display().to_string();
    lab.done("a", &["push", "--key", &key, &dir])?;
    let id = lab.id.to_string();
    lab.done("b", &["pull", "--key", &key, &dir, &id])?;
    lab.same()?;
    let verify = ["verify", "--store", &dir, "--store-key", &key];
    ensure!(lab.done("a", &verify)?.ends_with("whole\n"));
    lab.fails(
        "a",
        &["push", "--compress", "--key", &key, &dir],
        "FIRN-STORE-UNUSABLE",
        &["does not compress"],
    )?;

    lab.push()?;
    lab.fails(
        "a",
        &["push", "--key", &key, URL],
        "FIRN-STORE-KEY",
        &["is not encrypted"],
    )?;
    let open = lab.dir.path().join("open").display().to_string();
    fs::write(&open, "a".repeat(64))?;
    lab.fails(
        "a",
        &["push", "--key", &open, &dir],
        "FIRN-STORE-KEY",
        &["is not root's alone"],
    )
}
