//! The SONAME of a library, by which programs load it.
//!
//! Only the needed parts of the file are read: libraries of a driver have hundreds of megabytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use firn_host::open_regular;

/// Largest number of program headers and of dynamic entries that are read.
const MOST: u64 = 1024;
/// Longest name.
const LONGEST: usize = 255;

const LOAD: u64 = 1;
const DYNAMIC: u64 = 2;
const END: u64 = 0;
const STRTAB: u64 = 5;
const SONAME: u64 = 14;

/// The SONAME of the library in a file; none when the file is no library for this machine, or its name is not
/// plain.
pub fn of(path: &Path) -> Option<String> {
    Elf(open_regular(path).ok()?).soname().ok().flatten()
}

/// A 64-bit ELF file in this machine's byte order.
struct Elf(File);

/// A part of the file: where it is in it, in memory, and how long.
#[derive(Clone, Copy)]
struct Segment {
    offset: u64,
    address: u64,
    length: u64,
}

impl Elf {
    fn soname(&self) -> io::Result<Option<String>> {
        let magic: [u8; 6] = self.bytes(0)?;
        let order = if cfg!(target_endian = "little") { 1 } else { 2 };
        if magic != [0x7f, b'E', b'L', b'F', 2, order] {
            return Ok(None);
        }
        let headers = self.number(32)?;
        let sizes: [u8; 4] = self.bytes(54)?;
        let [size, count] =
            [[sizes[0], sizes[1]], [sizes[2], sizes[3]]].map(|two| u64::from(u16::from_ne_bytes(two)));
        let (mut loaded, mut dynamic) = (Vec::new(), None);
        for i in 0..count.min(MOST) {
            let at = sum(headers, i * size)?;
            let kind: [u8; 4] = self.bytes(at)?;
            let segment = Segment {
                offset: self.number(sum(at, 8)?)?,
                address: self.number(sum(at, 16)?)?,
                length: self.number(sum(at, 32)?)?,
            };
            match u64::from(u32::from_ne_bytes(kind)) {
                LOAD => loaded.push(segment),
                DYNAMIC => dynamic = Some(segment),
                _ => {}
            }
        }
        let Some(dynamic) = dynamic else {
            return Ok(None);
        };
        let (mut strings, mut name) = (None, None);
        for i in 0..(dynamic.length / 16).min(MOST) {
            let at = sum(dynamic.offset, i * 16)?;
            let value = self.number(sum(at, 8)?)?;
            match self.number(at)? {
                END => break,
                STRTAB => strings = Some(value),
                SONAME => name = Some(value),
                _ => {}
            }
        }
        let in_file = |address: u64| {
            let holds = |segment: &&Segment| {
                let offset = address.checked_sub(segment.address);
                offset.is_some_and(|offset| offset < segment.length)
            };
            loaded
                .iter()
                .find(holds)
                .map(|segment| address - segment.address + segment.offset)
        };
        match (strings.and_then(in_file), name) {
            (Some(strings), Some(name)) => self.text(sum(strings, name)?),
            _ => Ok(None),
        }
    }

    fn text(&self, at: u64) -> io::Result<Option<String>> {
        let mut bytes = vec![0; LONGEST + 1];
        let read = self.0.read_at(&mut bytes, at)?;
        let end = bytes[..read].iter().position(|byte| *byte == 0);
        let name = end.and_then(|end| String::from_utf8(bytes[..end].to_vec()).ok());
        Ok(name.filter(|name| !name.is_empty() && !name.contains('/') && name != ".."))
    }

    fn number(&self, at: u64) -> io::Result<u64> {
        self.bytes(at).map(u64::from_ne_bytes)
    }

    fn bytes<const N: usize>(&self, at: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }
}

fn sum(a: u64, b: u64) -> io::Result<u64> {
    a.checked_add(b).ok_or(io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C library that this test runs with.
    fn libc() -> std::path::PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let mut libraries = paths.filter(|path| path.contains("libc.so") || path.contains("libc-2"));
        libraries.next().unwrap().into()
    }

    #[test]
    fn only_a_library_has_a_name() {
        assert_eq!(of(&libc()).as_deref(), Some("libc.so.6"));
        assert_eq!(of(&std::env::current_exe().unwrap()), None);
        for path in ["/etc/passwd", "/dev/null", "/proc", "/nonexistent"] {
            assert_eq!(of(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn a_truncated_or_malformed_library_has_no_name() {
        let whole = std::fs::read(libc()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("lib");
        for length in [5, 40, 64, 200, 2000] {
            std::fs::write(&at, &whole[..length]).unwrap();
            assert_eq!(of(&at), None, "{length}");
        }
        for from in [32, 54, 64 + 8, 64 + 56 + 8] {
            let mut wrong = whole[..4096].to_vec();
            wrong[from..from + 8].fill(0xff);
            std::fs::write(&at, &wrong).unwrap();
            assert_eq!(of(&at), None, "{from}");
        }
    }
}
