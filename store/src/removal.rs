//! Removing from a store: with the lock alone, so that no writer relies on what goes, and never without a
//! proof.
//!
//! An index is removed if nothing is known that may need it **and** somebody has stated that its checkpoint
//! is gone, or the operator has named a time for which nothing may have named it. What is absent proves
//! nothing: a checkpoint may have been moved, archived or unmounted. [`Removable`] is that proof. Extents go
//! if no index names them that is left, which is found out with the lock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use firn_host::UnlessAbsent;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::error::{io, is_wrong_kind};
use super::{Digest, EXTENT, Index, Noted, Pin, Store, StoreError, layout, writer};
use crate::dir::UntrustedDir;

/// By what gc decides on an index that nothing is known to need.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Time since 1970.
    pub now: Duration,
    /// What is younger is kept: its firn.json may not be there yet.
    pub grace: Duration,
    /// This node, as [`machine`](super::machine) names it.
    pub machine: Option<String>,
    /// Whether to decide also on indexes of other nodes, of which directories and images are not seen here.
    pub other_machines: bool,
    /// For how long nothing may have named an index that nobody has stated to be gone. None: it is kept.
    pub unreferenced_since: Option<Duration>,
}

/// Why an index is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    Pinned(Pin),
    /// Something names it, or may name it: what that is.
    Needed(String),
    /// It came after gc had begun to look.
    New,
    Young {
        seconds: u64,
    },
    /// It is of this node, or of one that is not known.
    OfNode(String),
    /// Nothing is known that names it, for so long; and nobody has stated that it is gone.
    Unreferenced {
        seconds: u64,
    },
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned(Pin::Operator) => f.write_str("it is pinned"),
            Self::Pinned(Pin::Checkpoint) => {
                f.write_str("its checkpoint has pinned it, until `firn images prune` or `firn store unpin`")
            }
            Self::Needed(why) => f.write_str(why),
            Self::New => f.write_str("it is new"),
            Self::Young { seconds } => write!(f, "it is {seconds} s old"),
            Self::OfNode(host) => write!(f, "it is of node {host}, or of an older firn"),
            Self::Unreferenced { seconds } => write!(
                f,
                "nothing is seen that names it, for {seconds} s, and nobody has stated that it is gone"
            ),
        }
    }
}

/// Why an index stays; none: it may go. `needed`: what names it, or may.
///
/// Order matters for people alone: every reason keeps it.
fn kept(index: &Index, needed: Option<&str>, noted: &Noted, rules: &Rules) -> Option<Kept> {
    if let Some(pin) = noted.pin {
        return Some(Kept::Pinned(pin));
    }
    if let Some(why) = needed {
        return Some(Kept::Needed(why.to_owned()));
    }
    let made = Duration::from_secs(index.made);
    let age = rules.now.saturating_sub(made);
    if age < rules.grace {
        return Some(Kept::Young {
            seconds: age.as_secs(),
        });
    }
    let is_own = index.machine.is_some() && index.machine == rules.machine;
    if !is_own && !rules.other_machines {
        return Some(Kept::OfNode(index.host.clone()));
    }
    if noted.is_released {
        return None;
    }
    // One that was noted before it was made was noted by a wrong clock.
    let since = noted.unreferenced.map(|since| since.max(made));
    let unreferenced = since.map_or(Duration::ZERO, |since| rules.now.saturating_sub(since));
    match rules.unreferenced_since {
        Some(limit) if unreferenced >= limit => None,
        _ => Some(Kept::Unreferenced {
            seconds: unreferenced.as_secs(),
        }),
    }
}

/// Why each index may be needed, as far as that was found out without the lock; none: nothing is known.
pub type Needs = BTreeMap<Digest, Option<String>>;

/// What gc does.
#[derive(Debug)]
pub struct Decisions {
    /// The indexes that stay, with the reason.
    pub kept: BTreeMap<Digest, Kept>,
    /// Those that go.
    pub gone: BTreeMap<Digest, Index>,
    /// Extents that none of the indexes names that stay, by their names in the store, with the sizes of their
    /// files.
    pub extents: BTreeMap<Digest, u64>,
    /// Bytes of what was not finished.
    pub unfinished: u64,
}

impl Decisions {
    /// Decides on all indexes of the store. An index that is not in `needs` has come meanwhile, and stays.
    ///
    /// # Errors
    /// One cannot be read: it may need any extent.
    pub fn make(store: &Store, needs: &Needs, rules: &Rules) -> Result<Self, StoreError> {
        let mut decisions = Self {
            kept: BTreeMap::new(),
            gone: BTreeMap::new(),
            extents: BTreeMap::new(),
            unfinished: store.unfinished()?,
        };
        for id in store.images()? {
            let index = store.index(&id)?;
            let reason = match needs.get(&id) {
                None => Some(Kept::New),
                Some(needed) => kept(&index, needed.as_deref(), &store.noted(&id)?, rules),
            };
            match reason {
                Some(reason) => drop(decisions.kept.insert(id, reason)),
                None => drop(decisions.gone.insert(id, index)),
            }
        }
        decisions.extents = store.unneeded(&decisions.gone.keys().copied().collect())?;
        Ok(decisions)
    }

    /// Bytes that go.
    pub fn bytes(&self) -> u64 {
        self.extents.values().sum::<u64>() + self.unfinished
    }
}

/// Proof that an index may go. [`Removal::collect`] and [`Removal::damaged_index`] alone make it.
struct Removable(Digest);

/// Nobody writes while it is there.
#[derive(Debug)]
pub struct Removal<'a> {
    store: &'a Store,
    _lock: Flock<File>,
}

impl Store {
    /// Keeps writers out, to remove what is not needed. Waits for those that are at work.
    pub fn removal(&self) -> Result<Removal<'_>, StoreError> {
        let lock = layout::lock(self.dir(), self.root(), FlockArg::LockExclusiveNonblock)?;
        Ok(Removal {
            store: self,
            _lock: lock,
        })
    }

    /// The extents that no index names but those in `gone`, by their names in the store, with the sizes of
    /// their files.
    fn unneeded(&self, gone: &BTreeSet<Digest>) -> Result<BTreeMap<Digest, u64>, StoreError> {
        let mut extents = self.extents()?;
        for id in self.images()?.difference(gone) {
            for (extent, _) in self.index(id)?.extents() {
                if let Some(extent) = extent {
                    extents.remove(&self.form().name(&extent));
                }
            }
        }
        Ok(extents)
    }
}

impl Removal<'_> {
    /// Removes the indexes that may go, the extents that nothing needs then, and what writers have left that
    /// were killed. Notes of the others whether something names them.
    ///
    /// # Errors
    /// An index cannot be read, of which any extent may be: then nothing was removed. Or the file system
    /// refuses something: what is left stays whole.
    pub fn collect(&self, needs: &Needs, rules: &Rules) -> Result<Decisions, StoreError> {
        let decisions = Decisions::make(self.store, needs, rules)?;
        for (id, reason) in &decisions.kept {
            self.note(id, reason, rules)?;
        }
        // Order matters: no index is left without its extents.
        for id in decisions.gone.keys() {
            self.index(&Removable(*id))?;
        }
        for extent in decisions.extents.keys() {
            self.extent(extent)?;
        }
        let new = self.store.inside(layout::NEW)?;
        writer::clear(&new).map_err(io("clear", self.store.root().join(layout::NEW)))?;
        Ok(decisions)
    }

    /// Notes since when nothing is seen that names an index.
    fn note(&self, id: &Digest, reason: &Kept, rules: &Rules) -> Result<(), StoreError> {
        let noted = self.store.noted(id)?.unreferenced;
        match (reason, noted) {
            (Kept::Unreferenced { .. }, None) => self.store.set_unreferenced(id, Some(rules.now)),
            (Kept::Unreferenced { .. }, Some(_)) | (_, None) => Ok(()),
            // What another node sees is not known here.
            (Kept::OfNode(_), Some(_)) => Ok(()),
            (_, Some(_)) => self.store.set_unreferenced(id, None),
        }
    }

    /// Removes an index whose content does not match its name. Returns whether it is such a one.
    pub fn damaged_index(&self, image: &Digest) -> Result<bool, StoreError> {
        match self.store.index(image) {
            Err(StoreError::Index { .. }) => self.index(&Removable(*image)).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Removes an extent of this name in the store whose content does not match it: read again, because a
    /// writer may have replaced it. Returns whether it is such a one.
    pub fn damaged_extent(&self, name: &Digest) -> Result<bool, StoreError> {
        let size = self.store.size_of_extent(name)?;
        match self.store.compare(name, size, &mut vec![0; EXTENT]) {
            Err(StoreError::Extent { .. }) => self.extent(name).map(|()| true),
            Err(StoreError::Missing { .. }) | Ok(()) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes an index, what is noted of it, and not the extents that it names.
    fn index(&self, Removable(image): &Removable) -> Result<(), StoreError> {
        let name = image.to_string();
        let path = self.store.root().join(layout::IMAGES).join(&name);
        remove(self.store.images_dir(), &name, path)?;
        self.store.forget(image)
    }

    /// Removes the extent that has this name in the store.
    fn extent(&self, name: &Digest) -> Result<(), StoreError> {
        let (name, path) = (name.to_string(), self.store.extent_path(name));
        let fan = self.store.extents_dir().inside(&name[..2]).if_present();
        match fan.map_err(io("open", &path))? {
            None => Ok(()),
            Some(fan) => remove(&fan, &name, path),
        }
    }
}

/// Removes a file. An empty directory that has its name goes as well.
fn remove(dir: &UntrustedDir, name: &str, path: PathBuf) -> Result<(), StoreError> {
    let remove = |flags| unlinkat(dir, name, flags).map_err(io::Error::from);
    let removed = match remove(UnlinkatFlags::NoRemoveDir) {
        Err(error) if is_wrong_kind(&error) || error.kind() == io::ErrorKind::IsADirectory => {
            remove(UnlinkatFlags::RemoveDir)
        }
        removed => removed,
    };
    removed.unless_absent().map_err(io("remove", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_is_extents_and_what_was_not_finished() {
        let decisions = Decisions {
            kept: BTreeMap::new(),
            gone: BTreeMap::new(),
            extents: [(Digest::of(b"one"), 5), (Digest::of(b"two"), 7)].into(),
            unfinished: 11,
        };
        assert_eq!(decisions.bytes(), 23);
    }
}
