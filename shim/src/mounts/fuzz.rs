//! What must hold for mounts, whatever containerd asks for and the kernel lists.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::flags::Options;
use firn_host::mountinfo;

use super::{idmap, overlay};

/// The options of a mount, a line each; and all of it as mountinfo.
pub fn mounts(bytes: &[u8]) {
    check_list(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let lines: Vec<&str> = text.lines().collect();
    lines.iter().for_each(|line| maps_owners(line));
    let Ok(mut options) = Options::parse(lines.iter().copied()) else {
        assert!(lines.iter().any(|line| line.starts_with("X-containerd.")));
        return;
    };
    for option in &options.data {
        assert!(lines.contains(&option.as_str()) && !option.is_empty());
    }
    // What is left for the file system has no flag in it.
    let again = Options::parse(options.data.iter().map(String::as_str)).expect("they were taken once");
    assert!(again.flags.is_empty() && again.propagation.is_empty() && again.data == options.data);

    let before = options.data.clone();
    match overlay::compact(&mut options.data) {
        None => assert_eq!(options.data, before),
        Some(dir) => names_the_same_layers(&before, &options.data, &dir),
    }
}

fn names_the_same_layers(before: &[String], after: &[String], dir: &Path) {
    assert!(dir.is_absolute() && dir != Path::new("/"));
    assert_eq!(before.len(), after.len());
    let changed: Vec<_> = before
        .iter()
        .zip(after)
        .filter(|(before, after)| before != after)
        .collect();
    assert!(changed.len() <= 1);
    for (before, after) in changed {
        let layers = |option: &str| {
            // An escaped colon is part of a name.
            let list = option
                .strip_prefix("lowerdir=")
                .expect("only the layers are changed")
                .to_owned();
            let list = list.replace("\\\\", "\u{1}").replace("\\:", "\u{2}");
            list.split(':').map(str::to_owned).collect::<Vec<_>>()
        };
        let (before, after) = (layers(before), layers(after));
        assert_eq!(before.len(), after.len());
        for (before, after) in before.iter().zip(&after) {
            assert!(!after.is_empty() && Path::new(after).is_relative());
            assert_eq!(dir.join(after), Path::new(before));
        }
    }
}

/// The kernel gets lines of three numbers, as many as there are maps.
fn maps_owners(maps: &str) {
    if let Ok(lines) = idmap::lines(maps) {
        assert_eq!(lines.lines().count(), maps.split(',').count());
        for line in lines.lines() {
            assert!(
                line.split(' ').filter_map(|id| id.parse::<u32>().ok()).count() == 3,
                "{line:?}"
            );
            assert!(
                line.bytes().all(|byte| byte.is_ascii_digit() || byte == b' '),
                "{line:?}"
            );
        }
    }
}

/// A line made of an entry is read as the same entry.
fn check_list(bytes: &[u8]) {
    let escape = |bytes: &[u8]| -> Vec<u8> {
        let octal = bytes.iter().map(|byte| format!("\\{byte:03o}").into_bytes());
        octal.flatten().collect()
    };
    for entry in mountinfo::parse(bytes) {
        let fields = [
            entry.device.as_bytes(),
            entry.root.as_os_str().as_bytes(),
            entry.mount_point.as_os_str().as_bytes(),
            entry.options.as_bytes(),
            entry.fs_type.as_bytes(),
            entry.super_options.as_bytes(),
        ];
        let [device, root, point, options, fs_type, super_options] = fields.map(escape);
        let (id, parent) = (entry.id.to_string(), entry.parent.to_string());
        let group: &[u8] = if entry.propagates { b" master:1" } else { b"" };
        let line = [
            id.as_bytes(),
            b" ",
            parent.as_bytes(),
            b" ",
            &device,
            b" ",
            &root,
            b" ",
            &point,
            b" ",
            &options,
            group,
            b" - ",
            &fs_type,
            b" /dev/x ",
            &super_options,
        ];
        assert_eq!(mountinfo::parse(&line.concat()), [entry]);
    }
}
