//! `files.img`: open files. Which files of its mounts a process has open, and how, is not compared with
//! anything. Only files of a kind that the container could not open at all are refused, and paths with `..`.

use super::wire::{Message, WireError};
use super::{Image, ImageFault, missing};
use firn_oci::Spec;
use firn_oci::spec::capability;

pub(super) const NAME: &str = "files.img";
pub(super) const MAGIC: u32 = 0x5630_3138;

/// Fields that hold what only a capability gives, and which.
const PRIVILEGED: [(u32, &str, &str); 4] = [
    (6, "a packet socket", "CAP_NET_RAW"),
    (11, "a tun device", "CAP_NET_ADMIN"),
    (14, "a fanotify group", "CAP_SYS_ADMIN"),
    (21, "a BPF map", "CAP_SYS_ADMIN"),
];

/// The field of a socket of IPv4 or IPv6.
pub(super) const INET_SOCKET: u32 = 4;

/// The field of a Unix socket.
pub(super) const UNIX_SOCKET: u32 = 16;

/// A raw socket, as the kernel numbers types.
const RAW: u32 = 3;

enum FileRisk {
    Nothing,
    Climbs,
    Privileged(&'static str, &'static str),
}

pub(super) fn check(spec: &Spec, image: &Image) -> Result<(), ImageFault> {
    let bounding = spec.capabilities("bounding");
    for found in image.read(NAME, MAGIC, read)?.ok_or_else(|| missing(NAME))? {
        match found {
            FileRisk::Climbs => return Err(ImageFault::malformed(NAME, "a path that is relative or climbs")),
            FileRisk::Privileged(what, needs) if bounding & capability(needs) == 0 => {
                let allowed = format_args!("no {needs}");
                return Err(ImageFault::exceeds(NAME, "an open file", what, allowed));
            }
            _ => {}
        }
    }
    Ok(())
}

fn read(file: &Message<'_>) -> Result<FileRisk, WireError> {
    if let Some((_, what, needs)) = PRIVILEGED.into_iter().find(|(field, ..)| file.has(*field)) {
        return Ok(FileRisk::Privileged(what, needs));
    }
    if let Some(socket) = file.message(INET_SOCKET)?
        && socket.required(4)? == RAW
    {
        return Ok(FileRisk::Privileged("a raw socket", "CAP_NET_RAW"));
    }
    // The names of external files are those that CRIU's caller has for them.
    if let Some(regular) = file.message(3)?
        && regular.number(9)?.unwrap_or(0) == 0
    {
        // A name is any bytes but a NUL.
        let name = regular.bytes(6)?.ok_or(WireError { field: 6 })?;
        let climbs = name.split(|byte| *byte == b'/').any(|part| part == b"..");
        if name.first() != Some(&b'/') || name.contains(&0) || climbs {
            return Ok(FileRisk::Climbs);
        }
    }
    Ok(FileRisk::Nothing)
}
