use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;

use firn_host::FileId;
use firn_image::pod_shm::{Entry, FillShm, KeepShm, Kind, MadeFile, Reader, Writer};
use nix::sys::stat::{SFlag, lstat, mknod};
use nix::unistd::mkfifo;
use tempfile::TempDir;

use super::fill::Filler;
use super::held::{Held, held_by};
use super::keep::{DEEPEST, kept, write};
use super::*;

/// A tmpfs, as what it stands for.
fn dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn id(path: &Path) -> FileId {
    FileId::of(&fs::symlink_metadata(path).unwrap())
}

fn held(dir: &TempDir, names: &[&str]) -> Held {
    let names = names.iter().map(|name| (id(&dir.path().join(name)), true));
    names.collect()
}

/// The archive of a directory in which processes have these files open.
fn archived(dir: &TempDir, own: &[&str], others: &[&str]) -> Vec<u8> {
    let (own, others) = (held(dir, own), held(dir, others));
    let opened = open_dir(dir.path()).unwrap();
    let found = kept(&opened, &own, &others).unwrap();
    let mut archive = Vec::new();
    write(&opened, &found, &own, &mut archive).unwrap();
    archive
}

/// Fills the directory, in which processes have these files open. Returns the names of what was made.
fn filled(archive: &[u8], dir: &TempDir, held: &[&str]) -> Result<Vec<String>> {
    let record = tempfile::NamedTempFile::new().unwrap();
    let held = self::held(dir, held);
    let is_held = |file: FileId| held.contains_key(&file);
    let opened = open_dir(dir.path()).unwrap();
    let filler = Filler::new(opened, record.reopen().unwrap(), is_held);
    filler.fill(io::Cursor::new(archive))?;
    let lines = fs::read_to_string(record.path()).unwrap();
    let made = lines
        .lines()
        .map(|line| serde_json::from_str::<MadeFile>(line).unwrap());
    let mut names: Vec<String> = made.map(|made| String::from_utf8(made.name).unwrap()).collect();
    names.sort();
    Ok(names)
}

/// Everything in a directory: names, kinds, owners, modes and texts.
fn shown(dir: &Path) -> Vec<String> {
    let mut shown: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .flat_map(|entry| {
            let path = entry.unwrap().path();
            let found = fs::symlink_metadata(&path).unwrap();
            let mut lines = vec![format!(
                "{:?} {:o} {}:{} {} {}",
                path.file_name().unwrap(),
                found.mode(),
                found.uid(),
                found.gid(),
                if found.is_file() { found.len() } else { 0 },
                if found.is_file() { found.blocks() } else { 0 },
            )];
            if found.is_dir() {
                lines.extend(self::shown(&path));
            }
            lines
        })
        .collect();
    shown.sort();
    shown
}

#[test]
fn files_are_the_same_in_a_copy() {
    let (source, copy) = (dir(), dir());
    let at = |name: &str| source.path().join(name);
    fs::create_dir_all(at("dir/deep")).unwrap();
    fs::set_permissions(at("dir"), Permissions::from_mode(0o1777)).unwrap();
    fs::write(at("dir/deep/file"), vec![7; 3_000_000]).unwrap();
    fs::set_permissions(at("dir/deep/file"), Permissions::from_mode(0o040)).unwrap();
    lchown(at("dir/deep/file"), Some(1000), Some(1001)).unwrap();
    fs::hard_link(at("dir/deep/file"), at("other name")).unwrap();
    fs::set_permissions(at("dir/deep"), Permissions::from_mode(0o500)).unwrap();
    symlink("/nowhere", at("link")).unwrap();
    mkfifo(&at("pipe"), Mode::S_IRUSR).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    for piece in 0..6_u64 {
        sparse.write_at(b"piece", piece << 36).unwrap();
    }
    sparse.write_at(b"end", (1 << 40) - 3).unwrap();
    File::create(at("hole")).unwrap().set_len(1 << 20).unwrap();
    fs::write(at("empty"), "").unwrap();
    fs::write(at(&"n".repeat(255)), "long").unwrap();
    let odd = source
        .path()
        .join(std::ffi::OsString::from_vec(b"\xff\n".to_vec()));
    fs::write(&odd, "odd").unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    mknod(&at("node"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
    let archive = archived(&source, &["dir/deep/file"], &[]);
    assert!(archive.len() < 4 << 20, "{}", archive.len());

    let record = tempfile::tempfile().unwrap();
    let filler = Filler::new(open_dir(copy.path()).unwrap(), record, |_| false);
    filler.fill(io::Cursor::new(archive)).unwrap();
    fs::remove_file(at("socket")).unwrap();
    fs::remove_file(at("node")).unwrap();
    assert_eq!(shown(source.path()), shown(copy.path()));
    let of_copy = |name: &str| copy.path().join(name);
    assert_eq!(fs::read(of_copy("other name")).unwrap(), vec![7; 3_000_000]);
    assert_eq!(id(&of_copy("dir/deep/file")), id(&of_copy("other name")));
    assert_eq!(fs::read_link(of_copy("link")).unwrap(), Path::new("/nowhere"));
    let sparse = File::open(of_copy("sparse")).unwrap();
    for (text, at) in [(&b"piece"[..], 5 << 36), (b"end", (1 << 40) - 3)] {
        let mut read = vec![0; text.len()];
        sparse.read_at(&mut read, at).unwrap();
        assert_eq!(read, text);
    }
}

#[test]
fn what_only_others_have_open_stays_theirs() {
    let (source, copy) = (dir(), dir());
    for name in ["own", "shared", "theirs", "nobody"] {
        fs::write(source.path().join(name), name).unwrap();
    }
    let archive = archived(&source, &["own", "shared"], &["shared", "theirs"]);
    assert_eq!(filled(&archive, &copy, &[]).unwrap(), ["nobody", "own", "shared"]);
}

/// Also a second time, as where the kubelet starts the copy again.
#[test]
fn only_what_nobody_has_open_gives_way_and_only_to_what_the_copy_has_open() {
    let (source, copy) = (dir(), dir());
    let names = ["open-stale", "open-used", "open-same", "closed"];
    for name in names {
        fs::write(source.path().join(name), "of the checkpoint").unwrap();
        fs::write(copy.path().join(name), "of the pod").unwrap();
    }
    fs::write(copy.path().join("open-same"), "of the checkpoint").unwrap();
    fs::hard_link(source.path().join("open-stale"), source.path().join("second")).unwrap();
    fs::write(copy.path().join("second"), "of the pod").unwrap();
    let same = id(&copy.path().join("open-same"));
    let archive = archived(&source, &["open-stale", "open-used", "open-same"], &[]);
    for made in [&["open-stale", "second"][..], &[]] {
        assert_eq!(filled(&archive, &copy, &["open-used"]).unwrap(), made);
        let text = |name: &str| fs::read_to_string(copy.path().join(name)).unwrap();
        let texts = names.map(text);
        assert_eq!(
            texts,
            [
                "of the checkpoint",
                "of the pod",
                "of the checkpoint",
                "of the pod"
            ]
        );
        let at = |name: &str| id(&copy.path().join(name));
        assert_eq!(at("open-same"), same);
        assert_eq!(at("second"), at("open-stale"), "one file has two names");
        assert_eq!(fs::read_dir(copy.path()).unwrap().count(), 5);
    }
    // A file that stays has the other names of the one that it stands for.
    let (source, copy) = (dir(), dir());
    fs::write(source.path().join("one"), "of the checkpoint").unwrap();
    fs::hard_link(source.path().join("one"), source.path().join("two")).unwrap();
    let archive = archived(&source, &["one"], &[]);
    let first = Reader::begin(&*archive).unwrap().entry().unwrap().unwrap().name;
    let first = String::from_utf8(first).unwrap();
    fs::write(copy.path().join(&first), "of the pod").unwrap();
    filled(&archive, &copy, &[&first]).unwrap();
    let [one, two] = ["one", "two"].map(|name| id(&copy.path().join(name)));
    assert_eq!(one, two);
}

/// A leftover that differs in one thing from what the copy has open gives way.
#[test]
fn a_file_that_differs_in_one_thing_is_another() {
    let source = dir();
    let one = source.path().join("file");
    fs::write(&one, vec![1; 100_000]).unwrap();
    File::options()
        .write(true)
        .open(&one)
        .unwrap()
        .set_len(200_000)
        .unwrap();
    let archive = archived(&source, &["file"], &[]);
    let mut same = Vec::new();
    for change in [
        "nothing",
        "the first byte",
        "the last byte",
        "a hole",
        "the size",
        "the mode",
        "the group",
    ] {
        let copy = dir();
        let other = copy.path().join("file");
        fs::copy(&one, &other).unwrap();
        let file = OpenOptions::new().write(true).open(&other).unwrap();
        match change {
            "the first byte" => drop(file.write_at(&[2], 0).unwrap()),
            "the last byte" => drop(file.write_at(&[2], 99_999).unwrap()),
            "a hole" => drop(file.write_at(&[2], 150_000).unwrap()),
            "the size" => file.set_len(200_001).unwrap(),
            "the mode" => file.set_permissions(Permissions::from_mode(0o600)).unwrap(),
            "the group" => lchown(&other, None, Some(1)).unwrap(),
            _ => {}
        }
        let before = id(&other);
        filled(&archive, &copy, &[]).unwrap();
        if id(&other) == before {
            same.push(change);
        }
        let text = fs::read(&other).unwrap();
        assert!(
            text.len() == 200_000 && text[..100_000] == [1; 100_000][..],
            "{change}"
        );
        assert!(text[100_000..].iter().all(|byte| *byte == 0), "{change}");
    }
    assert_eq!(same, ["nothing"]);
}

fn entry(name: &str, kind: Kind) -> Entry {
    Entry {
        name: name.into(),
        kind,
        mode: 0o6755,
        uid: 0,
        gid: 0,
        held: true,
    }
}

/// An archive of these entries, each file with a text.
fn archive(entries: &[(&str, Kind)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::begin(&mut bytes).unwrap();
    for (name, kind) in entries {
        writer.entry(&entry(name, kind.clone())).unwrap();
        if let Kind::File(size) = kind {
            writer.content(0, *size, &mut io::repeat(b'x')).unwrap();
            writer.end_content().unwrap();
        }
    }
    writer.end().unwrap();
    bytes
}

#[test]
fn no_archive_leads_out_of_the_directory() {
    let link = |to: &str| Kind::Symlink(to.into());
    let cases: [(&str, &[(&str, Kind)]); 9] = [
        ("a path upwards", &[("a/../../kept", Kind::File(3))]),
        ("an absolute path", &[("/kept", Kind::File(3))]),
        (
            "a link upwards",
            &[("up", link("..")), ("up/kept", Kind::File(3))],
        ),
        (
            "a link in the way",
            &[("up", link("../kept")), ("up", Kind::File(3))],
        ),
        (
            "a hard link of nothing",
            &[("name", Kind::Link(b"../kept".to_vec()))],
        ),
        (
            "a hard link upwards",
            &[("../name", Kind::Link(b"first".to_vec()))],
        ),
        (
            "an absolute hard link",
            &[("/name", Kind::Link(b"first".to_vec()))],
        ),
        ("a pipe upwards", &[("../pipe", Kind::Pipe)]),
        ("the directory itself", &[(".", Kind::Directory)]),
    ];
    for (what, entries) in cases {
        let outside = dir();
        let root = tempfile::tempdir_in(outside.path()).unwrap();
        fs::write(outside.path().join("kept"), "kept").unwrap();
        let all = [&[("first", Kind::File(5))][..], entries].concat();
        let result = filled(&archive(&all), &root, &[]);
        let kept = fs::read_to_string(outside.path().join("kept")).unwrap();
        assert_eq!(kept, "kept", "{what}");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 2, "{what}");
        let is_harmless = ["a hard link of nothing", "a link in the way", "a link upwards"].contains(&what);
        assert_eq!(result.is_ok(), is_harmless, "{what}");
    }
}

#[test]
fn a_copy_gets_no_set_user_id_and_a_cut_archive_is_an_error() {
    let root = dir();
    let bytes = archive(&[
        ("dir", Kind::Directory),
        ("file", Kind::File(5000)),
        ("pipe", Kind::Pipe),
    ]);
    assert_eq!(filled(&bytes, &root, &[]).unwrap(), ["dir", "file", "pipe"]);
    assert_eq!(
        fs::metadata(root.path().join("file")).unwrap().mode() & 0o7777,
        0o755
    );
    assert!(
        fs::symlink_metadata(root.path().join("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    for length in 0..bytes.len() {
        filled(&bytes[..length], &dir(), &[]).unwrap_err();
    }
}

/// CRIU's links are names of files that have others. One of another container is nobody's in the copy.
#[test]
fn links_of_criu_have_the_fate_of_the_file_that_they_name() {
    let (source, copy) = (dir(), dir());
    let at = |name: &str| source.path().join(name);
    fs::write(at("named"), "text").unwrap();
    for link in ["link_remap.3", "link_remap.4"] {
        fs::hard_link(at("named"), at(link)).unwrap();
    }
    fs::write(copy.path().join("named"), "of the pod").unwrap();
    let archive = archived(&source, &["named"], &[]);
    let named = id(&copy.path().join("named"));
    let record = tempfile::tempfile().unwrap();
    let mut filler = Filler::new(open_dir(copy.path()).unwrap(), record, |file| file == named);
    filler.links.insert(b"link_remap.4".to_vec());
    filler.fill(io::Cursor::new(archive)).unwrap();
    assert_eq!(id(&copy.path().join("link_remap.4")), named);
    assert_eq!(fs::read_dir(copy.path()).unwrap().count(), 2);
}

#[test]
fn pipes_and_directories_of_others_stay_theirs() {
    let (source, copy) = (dir(), dir());
    let at = |name: &str| source.path().join(name);
    for name in ["theirs", "shared", "empty"] {
        fs::create_dir(at(name)).unwrap();
    }
    mkfifo(&at("pipe"), Mode::S_IRUSR).unwrap();
    for name in ["theirs/file", "shared/file", "shared/own"] {
        fs::write(at(name), "").unwrap();
    }
    let archive = archived(&source, &[], &["pipe", "theirs/file", "shared/file"]);
    assert_eq!(
        filled(&archive, &copy, &[]).unwrap(),
        ["empty", "shared", "shared/own"]
    );
}

/// What is in the place of a directory, and what is moved meanwhile.
#[test]
fn what_cannot_be_reached_is_left() {
    let (copy, bundle) = (dir(), dir());
    let bytes = archive(&[
        ("dir", Kind::Directory),
        ("dir/file", Kind::File(5000)),
        ("last", Kind::File(5)),
    ]);
    fs::write(copy.path().join("dir"), "a file").unwrap();
    assert_eq!(filled(&bytes, &copy, &[]).unwrap(), ["last"]);
    let request = FillShm {
        dir: copy.path().into(),
        archive: "/nowhere".into(),
        record: bundle.path().join("record"),
        pod: "/nowhere".into(),
    };
    let last = lstat(&copy.path().join("last")).unwrap().st_ino;
    let made = [("gone/file", 1), ("last", last)].map(|(name, inode)| MadeFile {
        name: name.into(),
        inode,
    });
    let lines = made.map(|made| serde_json::to_string(&made).unwrap() + "\n");
    fs::write(&request.record, lines.concat()).unwrap();
    in_thread(|| super::empty(&*json(&request)).unwrap());
    assert!(!copy.path().join("last").exists() && !request.record.exists());
}

/// By the commands, as the shim calls them, in an image directory of another user.
#[test]
fn a_copy_that_fails_leaves_nothing_but_what_somebody_has_open() {
    let (source, copy, image, bundle) = (dir(), dir(), dir(), dir());
    fs::create_dir(source.path().join("dir")).unwrap();
    for name in ["dir/inside", "other", "taken"] {
        fs::write(source.path().join(name), "text").unwrap();
    }
    let archive = image.path().join("dev-shm.img");
    let keep = |own: &[i32]| KeepShm {
        dir: source.path().into(),
        archive: archive.clone(),
        earlier: archive.clone(),
        own: own.to_vec(),
        pod: bundle.path().into(),
    };
    fs::set_permissions(image.path(), Permissions::from_mode(0o700)).unwrap();
    lchown(image.path(), Some(1000), Some(1000)).unwrap();
    // The cgroup of a pod, with one container.
    fs::create_dir(bundle.path().join("container")).unwrap();
    let mut child = opens(&source.path().join("other"));
    let own = i32::try_from(child.id()).unwrap();
    // As often as a client uses its directory.
    for _ in 0..2 {
        in_thread(|| super::keep(&*json(&keep(&[own]))).unwrap());
    }
    let names = fs::read_dir(image.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["dev-shm.img"]);
    fs::write(copy.path().join("taken"), "of another").unwrap();
    let request = FillShm {
        dir: copy.path().into(),
        archive: archive.clone(),
        record: bundle.path().join("record"),
        pod: bundle.path().into(),
    };
    in_thread(|| super::fill(&*json(&request)).unwrap());
    assert_eq!(
        fs::read_to_string(copy.path().join("dir/inside")).unwrap(),
        "text"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    let mut child = opens(&copy.path().join("other"));
    fs::write(
        bundle.path().join("container/cgroup.procs"),
        format!("{}\n", child.id()),
    )
    .unwrap();
    fs::write(copy.path().join("dir/of somebody"), "").unwrap();
    in_thread(|| super::empty(&*json(&request)).unwrap());
    let left = |at: &str| fs::read_dir(copy.path().join(at)).unwrap().count();
    assert_eq!((left("."), left("dir")), (3, 1));
    assert!(copy.path().join("other").exists(), "somebody has it open");
    child.kill().unwrap();
    child.wait().unwrap();
    // Without a record there is nothing to remove.
    in_thread(|| super::empty(&*json(&request)).unwrap());
}

/// Also where an earlier checkpoint in the same directory had something.
#[test]
fn with_nothing_to_keep_there_is_no_archive_or_an_empty_one() {
    let (source, image) = (dir(), dir());
    let archive = image.path().join("dev-shm.img");
    let request = KeepShm {
        dir: source.path().into(),
        archive: archive.clone(),
        earlier: archive.clone(),
        own: Vec::new(),
        pod: "/nowhere".into(),
    };
    let keep = || in_thread(|| super::keep(&*json(&request)).unwrap());
    keep();
    assert_eq!(fs::read_dir(image.path()).unwrap().count(), 0);
    fs::write(source.path().join("file"), "text").unwrap();
    let first = || {
        let archive = File::open(&archive).unwrap();
        Reader::begin(archive).unwrap().entry().unwrap()
    };
    keep();
    assert!(first().is_some());
    fs::remove_file(source.path().join("file")).unwrap();
    keep();
    assert!(first().is_none());
}

fn json(request: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(request).unwrap()
}

/// A process that has this file open.
fn opens(file: &Path) -> std::process::Child {
    let opened = File::open(file).unwrap();
    let mut sleep = std::process::Command::new("sleep");
    sleep.arg("1000").stdin(opened).spawn().unwrap()
}

/// Rights are those of a thread.
fn in_thread(work: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap());
}

#[test]
fn a_file_that_the_container_has_open_is_in_the_archive_or_there_is_none() {
    let source = dir();
    fs::write(source.path().join("file"), "text").unwrap();
    let own = held(&source, &["file"]);
    let opened = open_dir(source.path()).unwrap();
    let found = kept(&opened, &own, &Held::new()).unwrap();
    fs::remove_file(source.path().join("file")).unwrap();
    let error = write(&opened, &found, &own, Vec::new()).unwrap_err();
    assert!(error.to_string().contains("renamed or removed"), "{error:#}");
}

#[test]
fn open_and_mapped_files_of_a_process_are_held() {
    let shm = dir();
    let at = |name: &str| shm.path().join(name);
    for name in ["open", "deleted", "closed"] {
        fs::write(at(name), "text").unwrap();
    }
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    let mut child = std::process::Command::new("sh");
    child.args(["-c", "echo ready >&2; kill -STOP $$"]);
    child.stdin(File::open(at("open")).unwrap());
    child.stdout(File::open(at("deleted")).unwrap());
    let mut child = child.stderr(elsewhere.reopen().unwrap()).spawn().unwrap();
    let deleted = id(&at("deleted"));
    fs::remove_file(at("deleted")).unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    // Before, the kernel may show no mapping of its program.
    while fs::read(elsewhere.path()).unwrap().is_empty() {
        std::thread::yield_now();
    }
    let held = held_by(&[pid, i32::MAX], fs::metadata(shm.path()).unwrap().dev());
    let root = fs::metadata("/proc/self/exe").unwrap();
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let programs = held_by(&[pid], fs::metadata(&program).unwrap().dev());
    child.kill().unwrap();
    child.wait().unwrap();
    let expected = Held::from([(id(&at("open")), true), (deleted, false)]);
    assert_eq!(held, expected);
    assert!(programs.contains_key(&id(&program)) && !programs.contains_key(&FileId::of(&root)));
}

#[test]
fn directories_are_not_in_each_other_without_end() {
    let source = dir();
    let mut deep = source.path().to_owned();
    (0..=DEEPEST).for_each(|_| deep.push("d"));
    fs::create_dir_all(deep).unwrap();
    let opened = open_dir(source.path()).unwrap();
    let error = kept(&opened, &Held::new(), &Held::new()).err().unwrap();
    assert!(error.to_string().contains("in each other"), "{error:#}");
}
