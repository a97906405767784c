//! The loader's cache, `/etc/ld.so.cache`: which library is where.
//!
//! Only the format of glibc 2.2 and later is known (`glibc-ld.so.cache1.1`), alone or behind the older one. A
//! cache may come from an image: it is not believed, and one that is not whole is taken for none.

/// A library of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Name that programs ask for, `libcuda.so.1`.
    pub name: String,
    /// Where it is.
    pub path: String,
    /// Kind of library: ELF, C library and machine.
    flags: u32,
    /// Properties of the machine that it is meant for.
    hwcap: u64,
}

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Bytes of the header: magic, two counts, byte order, place of the extension, reserved.
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// Byte order of this machine, as the header names it.
const ORDER: u8 = if cfg!(target_endian = "little") { 2 } else { 3 };
/// In an entry's properties: they are in the extension, which is not kept.
const IN_EXTENSION: u64 = 1 << 62;
/// Most libraries that are read.
const MAX_LIBRARIES: usize = 100_000;
/// How often each byte of a cache may be part of a name or path: a name is often the end of a path. Entries
/// that all point to the same long text would be many times the cache.
const MAX_SHARED: usize = 4;

/// Flags of an ELF library for this machine's C library.
const NATIVE: u32 = if cfg!(target_arch = "aarch64") {
    0x0a03
} else {
    0x0303
};

impl Library {
    /// A library for this machine.
    pub fn new(name: &str, path: &str) -> Self {
        Self {
            name: name.to_owned(),
            path: path.to_owned(),
            flags: NATIVE,
            hwcap: 0,
        }
    }

    /// Whether it is for this machine.
    pub fn is_native(&self) -> bool {
        self.flags == NATIVE
    }
}

/// The libraries of a cache, in its order; none when it is not of a known form.
pub fn parse(bytes: &[u8]) -> Option<Vec<Library>> {
    let cache = if bytes.starts_with(OLD_MAGIC) {
        // Entries of 12 bytes follow a header of 16; what comes then is aligned to 8.

        let count = usize::try_from(word(bytes, 12)?).ok()?;
        let end = count.checked_mul(12)?.checked_add(16)?;
        bytes.get(end.checked_next_multiple_of(8)?..)?
    } else {
        bytes
    };
    let order = cache.get(28)?;
    if !cache.starts_with(MAGIC) || (*order != 0 && *order != ORDER) {
        return None;
    }
    let count = usize::try_from(word(cache, 20)?)
        .ok()
        .filter(|n| *n <= MAX_LIBRARIES)?;
    let mut left = cache.len() * MAX_SHARED;
    let libraries = (0..count).map(|i| {
        let library = library(cache, HEADER + i * ENTRY)?;
        left = left.checked_sub(library.name.len() + library.path.len())?;
        Some(library)
    });
    libraries.collect()
}

fn library(cache: &[u8], at: usize) -> Option<Library> {
    let low = u64::from(word(cache, at + 16)?);
    let high = u64::from(word(cache, at + 20)?);
    Some(Library {
        flags: word(cache, at)?,
        name: text(cache, word(cache, at + 4)?)?,
        path: text(cache, word(cache, at + 8)?)?,
        hwcap: if cfg!(target_endian = "little") {
            high << 32 | low
        } else {
            low << 32 | high
        },
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(word.try_into().ok()?))
}

fn text(cache: &[u8], at: u32) -> Option<String> {
    let from = cache.get(usize::try_from(at).ok()?..)?;
    let end = from.iter().take(4096).position(|byte| *byte == 0)?;
    String::from_utf8(from[..end].to_vec()).ok()
}

/// A cache of these libraries. Of two with one name the loader takes the first.
///
/// Libraries for certain machines whose properties the extension names are left out: each has one for all
/// machines.
pub fn write(libraries: &[Library]) -> Option<Vec<u8>> {
    let mut sorted: Vec<&Library> = libraries
        .iter()
        .filter(|library| library.hwcap & IN_EXTENSION == 0)
        .collect();
    // The loader searches by halves, from the greatest name to the least. Stable: the first of a name stays
    // so.
    sorted.sort_by(|a, b| compare(&b.name, &a.name).then(b.flags.cmp(&a.flags)));
    let strings_at = HEADER + sorted.len() * ENTRY;
    let (mut entries, mut strings) = (Vec::new(), Vec::new());
    for library in &sorted {
        entries.extend(library.flags.to_ne_bytes());
        for text in [&library.name, &library.path] {
            let at = u32::try_from(strings_at + strings.len()).ok()?;
            entries.extend(at.to_ne_bytes());
            strings.extend(text.bytes().chain([0]));
        }
        entries.extend([0; 4]);
        entries.extend(library.hwcap.to_ne_bytes());
    }
    let mut cache = MAGIC.to_vec();
    cache.extend(u32::try_from(sorted.len()).ok()?.to_ne_bytes());
    cache.extend(u32::try_from(strings.len()).ok()?.to_ne_bytes());
    cache.push(ORDER);
    cache.resize(HEADER, 0);
    cache.extend(entries);
    cache.extend(strings);
    Some(cache)
}

/// The loader's order of names: digits that stand together are a number.
fn compare(a: &str, b: &str) -> std::cmp::Ordering {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    let number = |text: &mut &[u8]| {
        let mut value = 0_i32;
        while let [digit @ b'0'..=b'9', rest @ ..] = text {
            value = value.wrapping_mul(10).wrapping_add(i32::from(digit - b'0'));
            *text = rest;
        }
        value
    };
    loop {
        let order = match (a.first(), b.first()) {
            (None, None) => return Equal,
            (Some(b'0'..=b'9'), Some(b'0'..=b'9')) => number(&mut a).cmp(&number(&mut b)),
            (Some(b'0'..=b'9'), _) => Greater,
            (_, Some(b'0'..=b'9')) => Less,
            (x, y) => {
                (a, b) = (a.get(1..).unwrap_or_default(), b.get(1..).unwrap_or_default());
                x.cmp(&y)
            }
        };
        if order != Equal {
            return order;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn names(libraries: &[Library]) -> Vec<&str> {
        libraries.iter().map(|library| library.name.as_str()).collect()
    }

    #[test]
    fn a_cache_is_read_as_it_was_written() {
        let given: Vec<Library> = [
            "libz.so.1",
            "libcuda.so.1",
            "libcuda.so.12",
            "libcuda.so.9",
            "liba.so",
        ]
        .iter()
        .map(|name| Library::new(name, &format!("/usr/lib/{name}")))
        .collect();
        let read = parse(&write(&given).unwrap()).unwrap();
        assert_eq!(
            names(&read),
            [
                "libz.so.1",
                "libcuda.so.12",
                "libcuda.so.9",
                "libcuda.so.1",
                "liba.so"
            ]
        );
        assert!(
            read.iter()
                .all(|library| given.contains(library) && library.is_native())
        );
        assert_eq!(parse(&write(&[]).unwrap()), Some(vec![]));
    }

    #[test]
    fn of_two_with_one_name_the_first_stays_first() {
        let given = [
            Library::new("liba.so.1", "/first"),
            Library::new("liba.so.1", "/second"),
        ];
        assert_eq!(parse(&write(&given).unwrap()).unwrap()[0].path, "/first");
    }

    #[test]
    fn what_is_not_whole_is_none() {
        let whole = write(&[Library::new("liba.so.1", "/lib/liba.so.1")]).unwrap();
        for length in 0..whole.len() {
            assert_eq!(parse(&whole[..length]), None, "{length} bytes");
        }
        let mut many = whole.clone();
        many[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(parse(&many), None);
        let mut far = whole.clone();
        far[HEADER + 4..HEADER + 8].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(parse(&far), None);
        let mut old = OLD_MAGIC.to_vec();
        old.resize(12, 0);
        old.extend(u32::MAX.to_ne_bytes());
        assert_eq!(parse(&old), None);
    }

    #[test]
    fn entries_that_share_one_long_text_are_not_copied() {
        let count = 60_000_u32;
        let text_at = u32::try_from(HEADER).unwrap() + count * 24;
        let mut cache = MAGIC.to_vec();
        cache.extend(count.to_ne_bytes());
        cache.extend([0; 4]);
        cache.resize(HEADER, 0);
        for _ in 0..count {
            let words = [NATIVE, text_at, text_at, 0, 0, 0];
            cache.extend(words.into_iter().flat_map(u32::to_ne_bytes));
        }
        cache.extend([b'x'; 4000]);
        cache.push(0);
        assert_eq!(parse(&cache), None);
    }

    #[test]
    fn the_older_form_may_come_before() {
        let mut both = OLD_MAGIC.to_vec();
        both.resize(12, 0);
        both.extend(1_u32.to_ne_bytes());
        both.extend([0; 12]);
        both.resize(32, 0);
        both.extend(write(&[Library::new("liba.so.1", "/lib/liba.so.1")]).unwrap());
        assert_eq!(names(&parse(&both).unwrap()), ["liba.so.1"]);
    }

    /// ldconfig prints what it finds in a cache of ours, in our order.
    #[test]
    fn the_systems_own_tool_reads_it() {
        let ldconfig = ["/sbin/ldconfig", "/usr/sbin/ldconfig"]
            .into_iter()
            .find(|path| std::fs::exists(path).unwrap())
            .expect("ldconfig, a part of the C library");
        let bytes = std::fs::read("/etc/ld.so.cache").expect("the cache that `ldconfig` makes");
        let mut libraries = parse(&bytes).expect("the system's own cache");
        let listed = |cache: &std::path::Path| {
            let output = Command::new(ldconfig)
                .arg("-p")
                .arg("-C")
                .arg(cache)
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines()
                .filter(|line| line.contains("=>"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let before = listed("/etc/ld.so.cache".as_ref());
        assert_eq!(before.len(), libraries.len());
        libraries.insert(0, Library::new("libfirn-test.so.1", "/x/libfirn-test.so.1"));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), write(&libraries).unwrap()).unwrap();
        let mut after = listed(file.path());
        let ours = after
            .iter()
            .position(|line| line.contains("libfirn-test.so.1 (libc6"));
        let ours = after.remove(ours.expect("ldconfig lists it"));
        assert!(ours.ends_with("=> /x/libfirn-test.so.1"), "{ours}");
        assert_eq!(after, before);
    }
}
