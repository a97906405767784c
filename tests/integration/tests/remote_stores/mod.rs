//! `firn store` with a bucket of an object store that speaks S3, and with one that answers wrong, late or not
//! at all.
//!
//! Needs neither root nor a node.

mod gateway;
mod packed;
mod proxy;
mod tls;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, answer, matrix};
use firn_node::wait_for;
use firn_store::{Digest, Index, Packing, Piece, Store};
use serde_json::Value;
use tempfile::TempDir;

use gateway::{Gateway, KEY, SECRET};
use packed::{
    a_store_is_packed_from_its_beginning_or_never, an_encrypted_bucket_shows_nothing_without_its_key,
};
use proxy::{EVER, Fault, How, Proxy};
use tls::a_certificate_is_compared;

const BUCKET: &str = "checkpoints";
const URL: &str = "s3://checkpoints/of/cluster";
/// Where its objects are in the gateway.
const OBJECTS: &str = "checkpoints/of/cluster";

/// Extents of the checkpoint, and their size.
const EXTENTS: usize = 40;
const SIZE: usize = 96 << 10;

const SOON: Duration = Duration::from_secs(30);

/// Two nodes with stores of their own, and an object store behind a proxy.
struct Lab {
    dir: TempDir,
    gateway: Gateway,
    proxy: Proxy,
    /// The checkpoint in the first store.
    id: Digest,
}

impl Lab {
    fn new() -> Result<Self> {
        let gateway = Gateway::start(BUCKET)?;
        let dir = tempfile::tempdir()?;
        Ok(Self {
            proxy: Proxy::start(gateway.address)?,
            id: checkpoint(&Store::create(&dir.path().join("a"), &Packing::default())?)?,
            dir,
            gateway,
        })
    }

    /// `firn store ...` on a node.
    fn command(&self, node: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(Built::for_tests()?.program("firn"));
        command.arg("store").args(arguments);
        if !arguments.contains(&"--store") {
            command.arg("--store").arg(self.dir.path().join(node));
        }
        command.envs([
            ("AWS_ACCESS_KEY_ID", KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ENDPOINT_URL", &format!("http://{}", self.proxy.address)),
            ("NO_PROXY", "127.0.0.1"),
        ]);
        Ok(command)
    }

    fn firn(&self, node: &str, arguments: &[&str]) -> Result<Output> {
        Ok(self.command(node, arguments)?.output()?)
    }

    /// It works.
    fn done(&self, node: &str, arguments: &[&str]) -> Result<String> {
        let output = self.firn(node, arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {}", all(&output));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn json(&self, node: &str, arguments: &[&str]) -> Result<Value> {
        let printed = self.done(node, &[arguments, &["--json"]].concat())?;
        answer(&[&["store"], arguments].concat(), &printed)
    }

    /// It fails with this code, a remedy and these words.
    fn fails(&self, node: &str, arguments: &[&str], code: &str, words: &[&str]) -> Result<()> {
        expect_refused(&self.firn(node, arguments)?, code, words).with_context(|| format!("{arguments:?}"))
    }

    fn push(&self) -> Result<Value> {
        Ok(self.json("a", &["push", URL])?["copied"][0].clone())
    }

    fn pull_arguments(&self) -> [String; 3] {
        ["pull".to_owned(), URL.to_owned(), self.id.to_string()]
    }

    /// Brings the checkpoint to the other node, where it is whole.
    fn pull(&self) -> Result<Value> {
        let arguments = self.pull_arguments();
        let pulled = self.json("b", &arguments.each_ref().map(String::as_str))?;
        ensure!(self.done("b", &["verify"])?.ends_with("whole\n"));
        self.same()?;
        Ok(pulled["copied"][0].clone())
    }

    fn pull_fails(&self, code: &str, words: &[&str]) -> Result<()> {
        let arguments = self.pull_arguments();
        self.fails("b", &arguments.each_ref().map(String::as_str), code, words)?;
        // What has come is whole, and no index promises more.
        ensure!(self.done("b", &["verify"])?.ends_with("whole\n"));
        ensure!(
            self.json("b", &["ls"])?["images"] == serde_json::json!([]),
            "an index is there"
        );
        Ok(())
    }

    /// Both nodes have the same memory.
    fn same(&self) -> Result<()> {
        let stores = ["a", "b"].map(|node| Store::open(&self.dir.path().join(node), &Packing::default()));
        let [a, b] = stores;
        let (a, b) = (a?, b?);
        ensure!(
            a.verified_index(&self.id)? == b.verified_index(&self.id)?,
            "another index"
        );
        ensure!(a.extents()? == b.extents()?, "other extents");
        Ok(())
    }

    /// Names of the objects, without the prefix.
    fn objects(&self) -> Result<BTreeSet<String>> {
        let (root, mut found) = (self.gateway.file(OBJECTS), BTreeSet::new());
        if root.exists() {
            walk(&root, &root, &mut found)?;
        }
        Ok(found)
    }

    fn any_extent(&self) -> Result<String> {
        let mut objects = self.objects()?.into_iter();
        objects
            .find(|name| name.starts_with("extents/"))
            .context("no extent")
    }
}

fn walk(root: &Path, dir: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            walk(root, &path, found)?
        } else {
            found.insert(path.strip_prefix(root)?.display().to_string());
        }
    }
    Ok(())
}

/// A checkpoint with memory that differs everywhere, and zeros.
fn checkpoint(store: &Store) -> Result<Digest> {
    let writer = store.writer(None)?;
    let mut pieces = Vec::new();
    for number in 0..EXTENTS {
        let seed = Digest::of(&number.to_ne_bytes()).to_string();
        let bytes: Vec<u8> = seed.bytes().cycle().take(SIZE).collect();
        pieces.push(piece(number, writer.put(&bytes)?));
    }
    pieces.push(piece(EXTENTS, None));
    Ok(writer.finish(&Index {
        checkpoint: "5b0f1c9e".to_owned(),
        made: 1_700_000_000,
        container: "train".to_owned(),
        host: "node-1".to_owned(),
        machine: None,
        image: "/images/train".into(),
        mount: None,
        owner: None,
        pieces,
    })?)
}

fn piece(number: usize, extent: Option<Digest>) -> Piece {
    Piece {
        pid: 1,
        address: 0x7000_0000_0000 + ((number as u64) << 24),
        length: SIZE as u64,
        extents: vec![extent],
    }
}

fn all(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn expect_refused(output: &Output, code: &str, words: &[&str]) -> Result<()> {
    let shown = all(output);
    ensure!(output.status.code() == Some(1), "{:?}: {shown}", output.status);
    for part in words.iter().copied().chain([&*format!("{code}:"), "hint: "]) {
        ensure!(shown.contains(part), "{part:?} is missing in: {shown}");
    }
    Ok(())
}

fn a_checkpoint_goes_to_a_bucket_and_comes_back() -> Result<()> {
    let lab = Lab::new()?;
    let total = EXTENTS * SIZE;
    let pushed = lab.push()?;
    ensure!(pushed["written"] == total && pushed["reused"] == 0, "{pushed}");
    // The objects have the names of a store's files, and their content.
    let objects = lab.objects()?;
    ensure!(objects.len() == EXTENTS + 2, "{objects:?}");
    for name in objects.iter().filter(|name| *name != "firn-store.json") {
        let (there, here) = (
            lab.gateway.file(OBJECTS).join(name),
            lab.dir.path().join("a").join(name),
        );
        ensure!(fs::read(there)? == fs::read(here)?, "{name} is another one");
    }
    let pushed = lab.push()?;
    ensure!(pushed["written"] == 0 && pushed["reused"] == total, "{pushed}");

    let listed = lab.json("a", &["ls", "--store", URL])?;
    ensure!(listed["store"] == URL, "{listed}");
    let [image] = &listed["images"].as_array().context("no list")?[..] else {
        anyhow::bail!("{listed}")
    };
    ensure!(
        image["id"] == lab.id.to_string() && image["state"] == "complete",
        "{image}"
    );
    ensure!(image["own"] == total && image["zero"] == SIZE, "{image}");
    ensure!(lab.done("a", &["verify", "--store", URL])?.ends_with("whole\n"));
    let pulled = lab.pull()?;
    ensure!(pulled["written"] == total, "{pulled}");
    // People get a rate.
    let shown = lab.done("a", &["push", URL])?;
    ensure!(
        shown.contains("0 B in ") && shown.contains("/s), 3.8 MiB were there"),
        "{shown}"
    );
    Ok(())
}

fn what_is_not_there_has_a_remedy() -> Result<()> {
    let lab = Lab::new()?;
    lab.fails(
        "b",
        &["pull", URL, "ab"],
        "FIRN-STORE-UNUSABLE",
        &["there is no store at", URL],
    )?;
    let nowhere = ["push", "s3://no-such-bucket/x"];
    lab.fails(
        "a",
        &nowhere,
        "FIRN-STORE-UNUSABLE",
        &["no bucket", "make the bucket"],
    )?;
    lab.fails(
        "a",
        &["push", "s3:///x"],
        "FIRN-STORE-UNUSABLE",
        &["names no bucket"],
    )?;
    lab.fails(
        "a",
        &["du", "--store", URL],
        "FIRN-STORE-UNUSABLE",
        &["is no directory"],
    )?;
    let mut stranger = lab.command("a", &["push", URL])?;
    let stranger = stranger.env("AWS_SECRET_ACCESS_KEY", "guessed").output()?;
    expect_refused(
        &stranger,
        "FIRN-STORE-REMOTE",
        &["does not permit", "AWS_SECRET_ACCESS_KEY"],
    )?;
    Ok(())
}

fn what_is_no_store_is_left_alone() -> Result<()> {
    let lab = Lab::new()?;
    // What is there is something else, or newer.
    fs::create_dir_all(lab.gateway.file(OBJECTS))?;
    let description = lab.gateway.file(OBJECTS).join("firn-store.json");
    for (text, words) in [
        ("{}", "does not describe a store"),
        (
            r#"{"format":"firn-store","version":3,"id":"x"}"#,
            "upgrade firn on this node",
        ),
    ] {
        fs::write(&description, text)?;
        lab.fails("a", &["push", URL], "FIRN-STORE-UNUSABLE", &[URL, words])?;
    }
    let objects = lab.objects()?;
    ensure!(objects.len() == 1, "{objects:?}");
    Ok(())
}

fn an_extent_that_was_lost_is_pushed_again() -> Result<()> {
    let lab = Lab::new()?;
    lab.push()?;
    lab.fails(
        "b",
        &["pull", URL, "00000000"],
        "FIRN-STORE-MISSING",
        &["00000000"],
    )?;
    let lost = lab.any_extent()?;
    fs::remove_file(lab.gateway.file(OBJECTS).join(&lost))?;
    let listed = lab.firn("a", &["ls", "--store", URL])?;
    ensure!(
        all(&listed).contains("incomplete, lacks 1 extent"),
        "{}",
        all(&listed)
    );
    let name = lost.rsplit('/').next().unwrap_or_default();
    lab.pull_fails("FIRN-STORE-MISSING", &[URL, name, "firn store push URL ID"])?;
    // The remedy works.
    let pushed = lab.push()?;
    ensure!(pushed["written"] == SIZE, "{pushed}");
    lab.pull().map(drop)
}

/// Requests for extents.
fn extents(method: &'static str, after: usize, times: usize, how: How) -> Option<Fault> {
    let path = "/extents/";
    Some(Fault {
        method,
        path,
        after,
        times,
        how,
    })
}

fn a_push_that_was_cut_off_goes_on() -> Result<()> {
    let lab = Lab::new()?;
    // The connection goes, and does not come back.
    lab.proxy.set(extents("PUT", 10, EVER, How::Cut));
    lab.fails(
        "a",
        &["push", URL],
        "FIRN-STORE-REMOTE",
        &["cannot write", "continues"],
    )?;
    ensure!(
        lab.proxy
            .done("PUT")
            .iter()
            .all(|path| !path.contains("/images/"))
    );
    ensure!(lab.objects()?.len() == 11, "{:?}", lab.objects()?);
    // The next one is killed.
    lab.proxy
        .set(extents("PUT", 0, EVER, How::Slow(Duration::from_millis(200))));
    let mut killed = lab.command("a", &["push", URL])?.stdout(Stdio::null()).spawn()?;
    wait_for("extents", SOON, || {
        Ok((lab.proxy.done("PUT").len() > 3).then_some(()))
    })?;
    killed.kill().and_then(|()| killed.wait())?;
    // What was under way arrives.
    wait_for("the end of the push", SOON, || {
        let before = lab.objects()?;
        std::thread::sleep(Duration::from_millis(500));
        Ok((before == lab.objects()?).then_some(()))
    })?;
    let there = lab.objects()?;
    ensure!(!there.iter().any(|name| name.starts_with("images/")), "{there:?}");

    lab.proxy.set(None);
    let left = EXTENTS + 1 - there.len();
    let pushed = lab.push()?;
    ensure!(pushed["written"] == left * SIZE, "{left} were left: {pushed}");
    let puts = lab.proxy.done("PUT");
    ensure!(puts.len() == left + 1, "{puts:?}");
    ensure!(
        puts.last().is_some_and(|path| path.contains("/images/")),
        "{puts:?}"
    );
    lab.pull().map(drop)
}

/// Two nodes push into an empty bucket at once: both have seen that there is no store.
fn two_first_pushes_make_one_store() -> Result<()> {
    const DESCRIPTION: &str = "firn-store.json";
    let lab = Lab::new()?;
    lab.proxy.set(Some(Fault {
        method: "PUT",
        path: DESCRIPTION,
        after: 0,
        times: 1,
        how: How::Slow(Duration::from_secs(5)),
    }));
    let late = lab.command("a", &["push", URL])?.stdout(Stdio::piped()).spawn()?;
    wait_for("the description that is late", SOON, || {
        let mut puts = lab.proxy.done("PUT").into_iter();
        Ok(puts.any(|path| path.contains(DESCRIPTION)).then_some(()))
    })?;
    let mut direct = lab.command("a", &["push", URL])?;
    direct.env("AWS_ENDPOINT_URL", format!("http://{}", lab.gateway.address));
    let output = direct.output()?;
    ensure!(output.status.success(), "{}", all(&output));
    let description = || fs::read(lab.gateway.file(OBJECTS).join(DESCRIPTION));
    let first = description()?;

    let output = late.wait_with_output()?;
    ensure!(output.status.success(), "{}", all(&output));
    ensure!(description()? == first, "the store has another description");
    lab.pull().map(drop)
}

fn an_object_store_without_conditions_is_used() -> Result<()> {
    let lab = Lab::new()?;
    let mut push = lab.command("a", &["push", URL])?;
    let output = push.env("AWS_CONDITIONAL_PUT", "disabled").output()?;
    ensure!(output.status.success(), "{}", all(&output));
    lab.pull().map(drop)
}

fn errors_are_repeated_and_then_reported() -> Result<()> {
    let lab = Lab::new()?;
    lab.proxy.set(extents("PUT", 3, 6, How::Error));
    lab.push()?;
    ensure!(lab.proxy.failed() == 6, "{} went wrong", lab.proxy.failed());
    lab.proxy.set(extents("GET", 3, 6, How::Error));
    lab.pull()?;
    ensure!(lab.proxy.failed() == 6, "{} went wrong", lab.proxy.failed());

    // Without its index, nothing is there.
    fs::remove_dir_all(lab.gateway.file(OBJECTS).join("images"))?;
    let index = Fault {
        method: "PUT",
        path: "/images/",
        after: 0,
        times: EVER,
        how: How::Error,
    };
    lab.proxy.set(Some(index));
    lab.fails(
        "a",
        &["push", URL],
        "FIRN-STORE-REMOTE",
        &["cannot write", "500", "images/"],
    )?;
    ensure!(lab.proxy.failed() > 3, "only {} attempts", lab.proxy.failed());
    lab.proxy.set(None);
    let pushed = lab.push()?;
    ensure!(pushed["written"] == 0, "{pushed}");
    lab.pull().map(drop)
}

fn a_slow_and_breaking_connection_brings_everything() -> Result<()> {
    let lab = Lab::new()?;
    lab.proxy.set(extents("PUT", 5, 5, How::Cut));
    lab.push()?;
    ensure!(lab.proxy.failed() == 5, "{} were cut", lab.proxy.failed());
    lab.proxy.set(extents("GET", 5, 5, How::Cut));
    lab.pull()?;
    ensure!(lab.proxy.failed() == 5, "{} were cut", lab.proxy.failed());
    fs::remove_dir_all(lab.dir.path().join("b"))?;
    lab.proxy
        .set(extents("GET", 0, EVER, How::Slow(Duration::from_millis(300))));
    lab.pull().map(drop)
}

fn wrong_bytes_are_refused() -> Result<()> {
    let lab = Lab::new()?;
    lab.push()?;
    lab.proxy.set(extents("GET", 7, 1, How::Damage));
    lab.pull_fails("FIRN-STORE-DAMAGED", &["extent s3://", "remove that object"])?;
    // What came well is not sent again.
    lab.proxy.set(None);
    let pulled = lab.pull()?;
    ensure!(pulled["reused"].as_u64() > Some(0), "{pulled}");
    let index = Fault {
        path: "/images/",
        ..extents("GET", 0, 1, How::Damage).context("a fault")?
    };
    fs::remove_dir_all(lab.dir.path().join("b"))?;
    Store::create(&lab.dir.path().join("b"), &Packing::default())?;
    lab.proxy.set(Some(index));
    lab.pull_fails("FIRN-STORE-DAMAGED", &["index s3://"])?;

    // What is damaged where it lies, by content or by length.
    lab.proxy.set(None);
    let object = lab.any_extent()?;
    let file = lab.gateway.file(OBJECTS).join(&object);
    for wrong in [vec![7; SIZE], vec![7; 5]] {
        fs::write(&file, &wrong)?;
        lab.pull_fails("FIRN-STORE-DAMAGED", &[&*object])?;
        let found = lab.firn("a", &["verify", "--store", URL])?;
        let name = object.rsplit('/').next().unwrap_or_default();
        ensure!(found.status.code() == Some(1), "{}", all(&found));
        ensure!(
            all(&found).contains(&format!("damaged     extent {name}")),
            "{}",
            all(&found)
        );
    }
    fs::remove_file(&file)?;
    lab.push()?;
    lab.pull().map(drop)
}

/// A trial, by the name of its function.
macro_rules! trials {
    ($($test:ident),+ $(,)?) => {
        [$(matrix::without_node(stringify!($test), $test)),+]
    };
}

pub(crate) fn suite() -> matrix::Suite {
    let trials = trials![
        a_checkpoint_goes_to_a_bucket_and_comes_back,
        what_is_not_there_has_a_remedy,
        what_is_no_store_is_left_alone,
        an_extent_that_was_lost_is_pushed_again,
        a_push_that_was_cut_off_goes_on,
        two_first_pushes_make_one_store,
        an_object_store_without_conditions_is_used,
        errors_are_repeated_and_then_reported,
        a_slow_and_breaking_connection_brings_everything,
        wrong_bytes_are_refused,
        a_certificate_is_compared,
        an_encrypted_bucket_shows_nothing_without_its_key,
        a_store_is_packed_from_its_beginning_or_never,
    ];
    matrix::Suite::new(&[]).with(trials)
}
