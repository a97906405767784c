//! `cgroup.img`. CRIU is configured to ignore it, except for the root of the cgroup namespace of a container
//! that has one: without it CRIU would make no namespace.
//!
//! CRIU makes paths in the host's cgroups from what it reads here.

use super::tasks::Task;
use super::wire::{Message, WireError};
use super::{Host, Image, ImageFault, Inventory};
use firn_oci::Spec;

const NAME: &str = "cgroup.img";
const MAGIC: u32 = 0x5938_3330;

/// Membership in one hierarchy.
struct Member {
    controller: String,
    path: String,
    /// How much of the path the namespace hides. CRIU makes a namespace for any value. It never writes 0,
    /// which would make the root of the hierarchy the namespace's root.
    prefix: Option<u32>,
}

#[derive(Default)]
struct Cgroups {
    /// By their ids.
    sets: Vec<(u32, Vec<Member>)>,
    /// Names of a hierarchy's controllers, and the paths below which the image describes cgroups.
    controllers: Vec<(Vec<String>, Vec<Dir>)>,
}

struct Dir {
    name: String,
    has_children: bool,
    /// A name in it or below that leads elsewhere.
    outside: Option<String>,
}

/// How deep cgroups may lie below each other.
const DEPTH: usize = 32;

impl Dir {
    fn read(message: &Message<'_>, depth: usize) -> Result<Self, WireError> {
        const NAME: u32 = 1;
        const CHILDREN: u32 = 2;
        const PROPERTIES: u32 = 3;
        if depth == 0 {
            return Err(WireError { field: CHILDREN });
        }
        let properties = message.each(PROPERTIES, |property| {
            Ok(property.required_text(NAME)?.to_owned())
        })?;
        let mut outside = properties
            .into_iter()
            .find(|name| !is_plain(name) || name.contains('/'));
        for child in message.each(CHILDREN, |child| Self::read(child, depth - 1))? {
            let name = Some(child.name).filter(|name| !name.split('/').all(is_plain));
            outside = outside.or(name).or(child.outside);
        }
        Ok(Self {
            name: message.required_text(NAME)?.to_owned(),
            has_children: message.has(CHILDREN),
            outside,
        })
    }
}

pub(super) fn check(
    spec: &Spec,
    image: &Image,
    inventory: &Inventory,
    tasks: &[Task],
    host: &Host,
) -> Result<(), ImageFault> {
    let cgroups = image.read_one(NAME, MAGIC, Cgroups::read)?.unwrap_or_default();
    let of_init = tasks.first().and_then(|init| init.cgroups);
    compare(spec, &cgroups, of_init, inventory.cgroups, host)
}

/// `of_init` and `of_criu` are the sets of the container's first process and of CRIU itself.
fn compare(
    spec: &Spec,
    cgroups: &Cgroups,
    of_init: Option<u32>,
    of_criu: Option<u32>,
    host: &Host,
) -> Result<(), ImageFault> {
    for (names, dirs) in &cgroups.controllers {
        if let Some(other) = names.iter().find(|name| !host.cgroups.contains(*name)) {
            return Err(exceeds("a hierarchy", other, "those of this node"));
        }
        // A process that went into a cgroup below has an entry of its own there.
        let may_have_others = !spec.has_namespace("cgroup");
        if own(dirs).is_none() || dirs.len() != 1 && !may_have_others {
            let found: Vec<&str> = dirs.iter().map(|dir| &*dir.name).collect();
            return Err(exceeds("the cgroups", &format!("{found:?}"), OWN));
        }
        if let Some(name) = dirs.iter().find_map(|dir| dir.outside.as_ref()) {
            let what = "a name below the container's cgroup";
            return Err(exceeds(what, name, "a plain name"));
        }
        if let Some(dir) = dirs.iter().find(|dir| dir.has_children && !may_have_others) {
            return Err(exceeds("a cgroup", &format!("one below {}", dir.name), OWN));
        }
    }
    for member in cgroups.sets.iter().flat_map(|(_, members)| members) {
        cgroups.is_own(member)?;
    }
    if !spec.has_namespace("cgroup") || spec.namespace_path("cgroup").is_some() {
        return Ok(());
    }
    // As CRIU decides it by init's own set.
    let has_root = cgroups
        .sets
        .iter()
        .find(|(id, _)| Some(*id) == of_init && of_init != of_criu)
        .is_some_and(|(_, members)| members.iter().any(|member| member.prefix.is_some()));
    let fault = || exceeds("the cgroup namespace", "the host's", "one of the container's own");
    has_root.then_some(()).ok_or_else(fault)
}

/// What a cgroup of the image has to be.
const OWN: &str = "the container's own";

fn exceeds(what: &str, found: &str, allowed: &str) -> ImageFault {
    ImageFault::exceeds(NAME, what, found, allowed)
}

/// The container's own cgroup of a hierarchy: the one that all others lie below.
fn own(dirs: &[Dir]) -> Option<&Dir> {
    let own = dirs.iter().min_by_key(|dir| dir.name.len())?;
    let is_path = |name: &str| name.split('/').all(is_plain);
    let is_below = |dir: &Dir| {
        let below = dir.name.strip_prefix(&*own.name);
        let below = below.and_then(|below| below.strip_prefix('/'));
        std::ptr::eq(dir, own) || !own.name.is_empty() && below.is_some_and(is_path)
    };
    let is_own = own.name.is_empty() || is_path(&own.name);
    (is_own && dirs.iter().all(is_below)).then_some(own)
}

fn is_plain(part: &str) -> bool {
    !matches!(part, "" | "." | "..")
}

impl Cgroups {
    fn read(message: &Message<'_>) -> Result<Self, WireError> {
        let member = |member: &Message<'_>| {
            Ok(Member {
                controller: member.required_text(1)?.to_owned(),
                path: member.required_text(2)?.to_owned(),
                prefix: member.number(3)?,
            })
        };
        let dir = |dir: &Message<'_>| Dir::read(dir, DEPTH);
        Ok(Self {
            sets: message.each(1, |set| Ok((set.required(1)?, set.each(2, member)?)))?,
            controllers: message.each(2, |of| Ok((of.texts(1)?, of.each(2, dir)?)))?,
        })
    }

    /// Whether a member lies where the image describes the container's cgroup of its hierarchy. That cgroup
    /// becomes the container's own here.
    fn is_own(&self, member: &Member) -> Result<(), ImageFault> {
        let mut hierarchies = self
            .controllers
            .iter()
            .filter(|(names, _)| names.contains(&member.controller));
        let dir = match (hierarchies.next(), hierarchies.next()) {
            (Some((_, dirs)), None) => own(dirs),
            _ => None,
        };
        let foreign = || exceeds("a cgroup", &member.path, OWN);
        let dir = &dir.ok_or_else(foreign)?.name;
        let below = member
            .path
            .strip_prefix('/')
            .and_then(|path| path.strip_prefix(&**dir));
        let below = below.ok_or_else(foreign)?;
        // CRIU puts the container's cgroup in the place of the directory's name, character by character.
        let children = below.strip_prefix('/').filter(|_| !dir.is_empty());
        let is_below = below.is_empty() || children.is_some_and(|path| path.split('/').all(is_plain));
        let root = u32::try_from(dir.len() + 1).unwrap_or(u32::MAX);
        let is_own = is_below && member.prefix.is_none_or(|prefix| prefix == root);
        is_own.then_some(()).ok_or_else(foreign)
    }
}

#[cfg(test)]
mod tests;
