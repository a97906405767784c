//! Parsers of cgroup files. A file that does not exist is no error: controllers are enabled and disabled.

use std::collections::{BTreeSet, HashMap};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use firn_host::UnlessAbsent;
use firn_host::proc_maps::unless_gone;

use super::CgroupError;

/// The number that stands for the word `max`.
pub const MAX: u64 = u64::MAX;

/// The file's text; none when the file or the cgroup does not exist.
pub fn text(path: &Path) -> Result<Option<String>, CgroupError> {
    match unless_gone(std::fs::read_to_string(path)) {
        Ok(text) => Ok(text),
        // A file that exists without its feature.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
        Err(source) => Err(CgroupError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// A file with one number, or `max`.
pub fn number(path: &Path) -> Result<Option<u64>, CgroupError> {
    let Some(text) = text(path)? else { return Ok(None) };
    parse_number(text.trim())
        .map(Some)
        .ok_or_else(|| CgroupError::Malformed {
            path: path.to_owned(),
        })
}

/// `max`, and -1 in v1, mean no limit: the largest number.
pub fn parse_number(text: &str) -> Option<u64> {
    match text {
        "max" | "-1" => Some(MAX),
        text => text.parse().ok(),
    }
}

/// A file of `key value` lines. Absent keys read as 0.
#[derive(Debug, Default)]
pub struct FlatKeyed(HashMap<String, u64>);

impl FlatKeyed {
    /// None when there is no such file.
    pub fn read(path: &Path) -> Result<Option<Self>, CgroupError> {
        let Some(text) = text(path)? else { return Ok(None) };
        let pairs = text.lines().filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            Some((key.to_owned(), parse_number(value.trim())?))
        });
        Ok(Some(Self(pairs.collect())))
    }

    pub fn get(&self, key: &str) -> u64 {
        self.find(key).unwrap_or_default()
    }

    pub fn find(&self, key: &str) -> Option<u64> {
        self.0.get(key).copied()
    }
}

/// One line of a file of `name key=value key=value` lines.
pub struct NestedLine<'a> {
    pub name: &'a str,
    pairs: Vec<(&'a str, u64)>,
}

impl<'a> NestedLine<'a> {
    pub fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?;
        let pairs = words.filter_map(|word| {
            let (key, value) = word.split_once('=')?;
            Some((key, parse_number(value)?))
        });
        Some(Self {
            name,
            pairs: pairs.collect(),
        })
    }

    pub fn get(&self, key: &str) -> u64 {
        self.pairs
            .iter()
            .find(|(name, _)| *name == key)
            .map_or(0, |(_, value)| *value)
    }
}

/// The `major:minor` of a device.
pub fn device(text: &str) -> Option<(u64, u64)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The host's huge page sizes, from directories like `hugepages-2048kB`, in the form of cgroup files: `2MB`.
pub fn page_sizes(dir: &Path) -> Result<Vec<String>, CgroupError> {
    let size = |path: &PathBuf| {
        let name = path.file_name()?.to_str()?;
        let kib: u64 = name
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse()
            .ok()?;
        Some(match kib {
            0..1024 => format!("{kib}KB"),
            1024..1_048_576 => format!("{}MB", kib >> 10),
            _ => format!("{}GB", kib >> 20),
        })
    };
    Ok(entries(dir)?.iter().filter_map(size).collect())
}

/// The huge page sizes for which the directory has files `hugetlb.SIZE.SUFFIX`, as in `2MB`.
pub fn hugetlb_sizes(dir: &Path, suffix: &str) -> Result<Vec<String>, CgroupError> {
    let mut sizes = BTreeSet::new();
    for name in entries(dir)?.iter().filter_map(|path| path.file_name()?.to_str()) {
        let size = name
            .strip_prefix("hugetlb.")
            .and_then(|rest| rest.strip_suffix(suffix)?.strip_suffix('.'));
        // `hugetlb.SIZE.rsvd.*` counts reservations.
        sizes.extend(size.filter(|size| !size.contains('.')).map(str::to_owned));
    }
    Ok(sizes.into_iter().collect())
}

/// The cgroups directly below a cgroup; none when it does not exist any more.
pub fn children(dir: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    Ok(entries(dir)?.into_iter().filter(|path| path.is_dir()).collect())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let failed = |source| CgroupError::Read {
        path: dir.to_owned(),
        source,
    };
    let listing = std::fs::read_dir(dir).if_present().map_err(failed)?;
    (listing.into_iter().flatten())
        .map(|entry| entry.map(|entry| entry.path()).map_err(failed))
        .collect()
}

/// Writes a file that exists.
pub fn write(path: &Path, word: &str) -> Result<(), CgroupError> {
    let write = || {
        std::fs::OpenOptions::new()
            .write(true)
            .open(path)?
            .write_all(word.as_bytes())
    };
    write().map_err(|source| CgroupError::Write {
        path: path.to_owned(),
        source,
    })
}

/// For 32-bit fields, in which the largest number means no limit too.
pub fn saturate(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
