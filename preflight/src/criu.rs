//! What a version of CRIU cannot do on a version of Linux.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket, sockopt};

/// The first CRIU with plugins that firn's is one of.
const HAS_PLUGINS: (u32, u32) = (4, 0);

/// The first CRIU that does not ask sockets of every family for options that Linux has for a few families
/// alone since 6.16 (CRIU's pull request 2711, November 2025).
const ASKS_FEW: (u32, u32) = (4, 2);

/// The first CRIU that may dump without UDP-Lite (CRIU's issue 3002, July 2026).
const LIVES_WITHOUT_UDP_LITE: (u32, u32) = (4, 3);

/// The first Linux without UDP-Lite.
const WITHOUT_UDP_LITE: (u32, u32) = (7, 1);

/// What the CRIU of a node cannot do on its kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CriuLimits {
    /// It loads no plugin of firn.
    pub no_plugin: bool,
    /// It dumps no socket of TCP, UDP, raw IP or packets.
    pub no_inet: bool,
    /// It dumps nothing.
    pub no_dump: bool,
}

impl CriuLimits {
    /// By the last word of a line that `criu --version` prints, and the release of this kernel. Of a version
    /// that is no number none is known. `repaired`: it does on this kernel what its version does not.
    pub fn of(version: &str, kernel: &str, repaired: bool) -> Self {
        Self::with(version, kernel, repaired, keeps_credentials_to_unix())
    }

    fn with(version: &str, kernel: &str, repaired: bool, keeps_to_unix: bool) -> Self {
        let Some(version) = version.split_whitespace().last().and_then(numbers) else {
            return Self::default();
        };
        Self {
            no_plugin: version < HAS_PLUGINS,
            no_inet: !repaired && version < ASKS_FEW && keeps_to_unix,
            no_dump: !repaired
                && version < LIVES_WITHOUT_UDP_LITE
                && numbers(kernel) >= Some(WITHOUT_UDP_LITE),
        }
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
        for (version, kernel, keeps_to_unix, limits) in [
            ("Version: 4.2.1", "6.18.44", true, [false, false, false]),
            ("Version: 4.1", "6.12.1+deb13", false, [false, false, false]),
            ("4.1.1", "6.16-rc1", true, [false, true, false]),
            // Kernels of distributions have it under older numbers.
            ("4.1.1", "6.12.90", true, [false, true, false]),
            ("3.19", "6.1.0", false, [true, false, false]),
            ("3.19", "6.18.0", true, [true, true, false]),
            ("4.2.1", "7.1.3-arch1", true, [false, false, true]),
            ("4.1.1", "7.1.3", true, [false, true, true]),
            ("4.3", "7.1.3-arch1", true, [false, false, false]),
            ("git", "6.18", true, [false, false, false]),
            ("", "6.18", true, [false, false, false]),
        ] {
            let [no_plugin, no_inet, no_dump] = limits;
            let expected = CriuLimits {
                no_plugin,
                no_inet,
                no_dump,
            };
            let found = CriuLimits::with(version, kernel, false, keeps_to_unix);
            assert_eq!(found, expected, "{version} {kernel}");
            let repaired = CriuLimits::with(version, kernel, true, keeps_to_unix);
            let expected = CriuLimits {
                no_plugin,
                ..CriuLimits::default()
            };
            assert_eq!(repaired, expected, "{version} {kernel}");
        }
    }

    #[test]
    fn this_kernel_is_asked() {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert!(keeps_credentials_to_unix() || numbers(&release).unwrap() < (6, 16));
    }
}
