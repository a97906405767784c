//! The options of a mount, as written in fstab, taken apart. No I/O.

use nix::mount::MsFlags;

use super::MountError;

/// Flags that change how mounts propagate. The kernel wants them in a call of their own.
const PROPAGATION: MsFlags = MsFlags::MS_SHARED
    .union(MsFlags::MS_PRIVATE)
    .union(MsFlags::MS_SLAVE)
    .union(MsFlags::MS_UNBINDABLE);

/// Prefix of options that containerd adds for itself.
const RESERVED: &str = "X-containerd.";

/// What the options of one mount ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// Flags of the mount itself.
    pub(super) flags: MsFlags,
    /// Propagation to set afterwards.
    pub(super) propagation: MsFlags,
    /// Options of the file system.
    pub(super) data: Vec<String>,
    /// The source is a file that needs a loop device.
    pub(super) looped: bool,
    /// The loop device bypasses the page cache.
    pub(super) direct_io: bool,
    /// The map of user ids, as the option `uidmap` has it.
    pub(super) users: Option<String>,
    /// The map of group ids, as the option `gidmap` has it.
    pub(super) groups: Option<String>,
}

impl Options {
    /// Reads the options in order; a later one overrides an earlier one.
    pub(super) fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<Self, MountError> {
        let mut parsed = Self {
            flags: MsFlags::empty(),
            propagation: MsFlags::empty(),
            data: Vec::new(),
            looped: false,
            direct_io: false,
            users: None,
            groups: None,
        };
        for option in options {
            if option.starts_with(RESERVED) {
                return Err(MountError::Reserved {
                    option: option.to_owned(),
                });
            }
            match option {
                "loop" => parsed.looped = true,
                "direct-io" => parsed.direct_io = true,
                _ => match option.split_once('=') {
                    Some(("uidmap", map)) => parsed.users = Some(map.to_owned()),
                    Some(("gidmap", map)) => parsed.groups = Some(map.to_owned()),
                    _ => parsed.flag_or_data(option),
                },
            }
        }
        Ok(parsed)
    }

    fn flag_or_data(&mut self, option: &str) {
        match flag(option) {
            Some((flags, true)) if flags.intersects(PROPAGATION) => self.propagation |= flags,
            Some((flags, true)) => self.flags |= flags,
            Some((flags, false)) => self.flags -= flags,
            None if option.is_empty() => {}
            None => self.data.push(option.to_owned()),
        }
    }

    /// Whether a bind mount needs a second call: the first one takes over the flags of its source. As with
    /// the stock shim, other flags count for a read-only bind alone.
    pub(super) fn restricts_bind(&self) -> bool {
        self.flags.contains(MsFlags::MS_BIND | MsFlags::MS_RDONLY)
    }
}

/// What an option sets (true) or clears (false).
fn flag(option: &str) -> Option<(MsFlags, bool)> {
    let recursive = |flags| flags | MsFlags::MS_REC;
    Some(match option {
        "defaults" => (MsFlags::empty(), true),
        "async" => (MsFlags::MS_SYNCHRONOUS, false),
        "atime" => (MsFlags::MS_NOATIME, false),
        "bind" => (MsFlags::MS_BIND, true),
        "dev" => (MsFlags::MS_NODEV, false),
        "diratime" => (MsFlags::MS_NODIRATIME, false),
        "dirsync" => (MsFlags::MS_DIRSYNC, true),
        "exec" => (MsFlags::MS_NOEXEC, false),
        "lazytime" => (MsFlags::MS_LAZYTIME, true),
        "mand" => (MsFlags::MS_MANDLOCK, true),
        "noatime" => (MsFlags::MS_NOATIME, true),
        "nodev" => (MsFlags::MS_NODEV, true),
        "nodiratime" => (MsFlags::MS_NODIRATIME, true),
        "noexec" => (MsFlags::MS_NOEXEC, true),
        "nolazytime" => (MsFlags::MS_LAZYTIME, false),
        "nomand" => (MsFlags::MS_MANDLOCK, false),
        "norelatime" => (MsFlags::MS_RELATIME, false),
        "nostrictatime" => (MsFlags::MS_STRICTATIME, false),
        "nosuid" => (MsFlags::MS_NOSUID, true),
        "rbind" => (recursive(MsFlags::MS_BIND), true),
        "relatime" => (MsFlags::MS_RELATIME, true),
        "remount" => (MsFlags::MS_REMOUNT, true),
        "ro" => (MsFlags::MS_RDONLY, true),
        "rw" => (MsFlags::MS_RDONLY, false),
        "strictatime" => (MsFlags::MS_STRICTATIME, true),
        "suid" => (MsFlags::MS_NOSUID, false),
        "sync" => (MsFlags::MS_SYNCHRONOUS, true),
        "private" => (MsFlags::MS_PRIVATE, true),
        "rprivate" => (recursive(MsFlags::MS_PRIVATE), true),
        "rshared" => (recursive(MsFlags::MS_SHARED), true),
        "rslave" => (recursive(MsFlags::MS_SLAVE), true),
        "runbindable" => (recursive(MsFlags::MS_UNBINDABLE), true),
        "shared" => (MsFlags::MS_SHARED, true),
        "slave" => (MsFlags::MS_SLAVE, true),
        "unbindable" => (MsFlags::MS_UNBINDABLE, true),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_propagation_and_data_are_kept_apart() {
        let options =
            Options::parse(["rbind", "ro", "rslave", "index=off", "volatile", "", "defaults"]).unwrap();
        assert_eq!(
            options.flags,
            MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY
        );
        assert_eq!(options.propagation, MsFlags::MS_SLAVE | MsFlags::MS_REC);
        assert_eq!(options.data, ["index=off", "volatile"]);
        assert!(
            options.restricts_bind()
                && !options.looped
                && options.users.is_none()
                && options.groups.is_none()
        );
    }

    #[test]
    fn a_later_option_overrides_an_earlier_one() {
        let options = Options::parse(["ro", "noexec", "nosuid", "rw", "exec"]).unwrap();
        assert_eq!(options.flags, MsFlags::MS_NOSUID);
        assert!(!options.restricts_bind());
        assert!(!Options::parse(["bind", "ro", "rw"]).unwrap().restricts_bind());
    }

    #[test]
    fn reserved_options_are_refused_and_requests_are_seen() {
        let error = Options::parse(["ro", "X-containerd.custom=1"]).unwrap_err();
        assert!(
            matches!(&error, MountError::Reserved { option } if option == "X-containerd.custom=1"),
            "{error}"
        );
        let options = Options::parse(["loop", "direct-io", "uidmap=0:1000:1"]).unwrap();
        assert!(options.looped && options.direct_io && options.data.is_empty());
        let users = Some("0:1000:1".to_owned());
        assert_eq!((options.users, options.groups), (users, None));
    }
}
