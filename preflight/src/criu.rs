//! What a version of CRIU cannot do on a version of Linux.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket, sockopt};

/// The version of CRIU before which it asks sockets of every family for options that Linux has for a few
/// families alone since 6.16 (CRIU's pull request 2711, November 2025).
const ASKS_FEW: (u32, u32) = (4, 2);

/// The first CRIU with firn's plugins.
const HAS_PLUGINS: (u32, u32) = (4, 0);

/// The last CRIU that dumps nothing on [`WITHOUT_UDP_LITE`], unless its distribution has repaired it (CRIU's
/// issue 3002, July 2026).
const KNOWS_UDP_LITE: (u32, u32) = (4, 2);

/// The first Linux without UDP-Lite.
const WITHOUT_UDP_LITE: (u32, u32) = (7, 1);

/// What the CRIU of a node cannot do on its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CriuLimit {
    /// Load firn's plugin.
    Plugins,
    /// Dump a socket of TCP, UDP, raw IP or packets.
    Inet,
    /// Dump anything, unless its distribution has repaired it.
    Dumps,
}

impl CriuLimit {
    /// By the last word of a line that `criu --version` prints, and the release of this kernel. Of a version
    /// that is no number none is known.
    pub fn of(version: &str, kernel: &str) -> Option<Self> {
        Self::with(version, kernel, keeps_credentials_to_unix())
    }

    fn with(version: &str, kernel: &str, keeps_to_unix: bool) -> Option<Self> {
        let version = numbers(version.split_whitespace().last()?)?;
        if version < HAS_PLUGINS {
            return Some(Self::Plugins);
        }
        if version < ASKS_FEW && keeps_to_unix {
            return Some(Self::Inet);
        }
        let repaired = version > KNOWS_UDP_LITE || numbers(kernel)? < WITHOUT_UDP_LITE;
        (!repaired).then_some(Self::Dumps)
    }
}

/// The first two numbers of a version.
fn numbers(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

/// Whether this kernel refuses what an older CRIU asks each socket.
fn keeps_credentials_to_unix() -> bool {
    let Ok(udp) = socket(AddressFamily::INET, SocketType::DGRAM, None) else {
        return false;
    };
    sockopt::socket_passcred(&udp) == Err(Errno::OPNOTSUPP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_of_criu_has_limits_by_the_kernel() {
        for (version, kernel, keeps_to_unix, expected) in [
            ("Version: 4.2.1", "6.18.44", true, None),
            ("Version: 4.1", "6.12.1+deb13", false, None),
            ("4.1.1", "6.16-rc1", true, Some(CriuLimit::Inet)),
            // Kernels of distributions have it under older numbers.
            ("4.1.1", "6.12.90", true, Some(CriuLimit::Inet)),
            ("3.19", "6.1.0", false, Some(CriuLimit::Plugins)),
            ("4.2.1", "7.1.3-arch1", true, Some(CriuLimit::Dumps)),
            ("4.3", "7.1.3-arch1", true, None),
            ("git", "6.18", true, None),
            ("", "6.18", true, None),
        ] {
            let found = CriuLimit::with(version, kernel, keeps_to_unix);
            assert_eq!(found, expected, "{version} {kernel}");
        }
    }

    #[test]
    fn this_kernel_is_asked() {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert!(keeps_credentials_to_unix() || numbers(&release).unwrap() < (6, 16));
    }
}
