//! CRIU's rules in iptables.
//!
//! In a network namespace of the container's own they are a chain, `CRIU`, which drops all packets but CRIU's
//! own. In the host's they are two rules for each connection.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Ends;

/// CRIU finds them in PATH, too.
pub(super) const PROGRAMS: [&str; 2] = ["iptables", "ip6tables"];

/// The mark of CRIU's own packets.
const MARK: &str = "0xc114";

/// Removes CRIU's rules for these connections, or, in a namespace of the container's own, CRIU's chain.
/// Changes nothing if there are none.
pub(super) fn unlock(program: &str, is_own: bool, ends: &BTreeSet<Ends>) -> Result<()> {
    let listed = match Command::new(program).args(["-w", "-S"]).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        listed => listed.with_context(|| format!("cannot run {program}"))?,
    };
    let rules = String::from_utf8_lossy(&listed.stdout);
    let removals = if is_own {
        chain(&rules)
    } else {
        connections(&rules, ends)
    };
    for removal in removals {
        let removed = Command::new(program).arg("-w").args(&removal).output();
        let removed = removed.with_context(|| format!("cannot run {program}"))?;
        if !removed.status.success() {
            let output = String::from_utf8_lossy(&removed.stderr);
            bail!("{program} {}: {}", removal.join(" "), output.trim());
        }
    }
    Ok(())
}

/// Arguments that remove CRIU's chain from a list of rules. While a second dump in the same namespace needs
/// it, only the rules that lead to it, one each.
fn chain(rules: &str) -> Vec<Vec<&str>> {
    let is_crius = |rule: &str| rule.starts_with("-A CRIU ") && rule.contains(MARK);
    if !rules.lines().any(is_crius) {
        return Vec::new();
    }
    let count = |jump: &str| rules.lines().filter(|rule| rule.trim() == jump).count();
    let jumps = [
        ("INPUT", count("-A INPUT -j CRIU")),
        ("OUTPUT", count("-A OUTPUT -j CRIU")),
    ];
    let led = jumps.iter().filter(|(_, count)| *count > 0);
    let mut removals: Vec<_> = led.map(|(from, _)| vec!["-D", *from, "-j", "CRIU"]).collect();
    if jumps.iter().all(|(_, count)| *count <= 1) {
        removals.extend([vec!["-F", "CRIU"], vec!["-X", "CRIU"]]);
    }
    removals
}

/// Arguments that remove CRIU's rules for these connections from a list of rules.
fn connections<'r>(rules: &'r str, ends: &BTreeSet<Ends>) -> Vec<Vec<&'r str>> {
    let removal = |rule: &'r str| {
        let words: Vec<&str> = rule.strip_prefix("-A ")?.split_ascii_whitespace().collect();
        let after = |name: &str| {
            let at = words.iter().position(|word| *word == name)?;
            words.get(at + 1).copied()
        };
        if after("--mark") != Some(MARK) || after("-j") != Some("DROP") {
            return None;
        }
        let end = |address: &str, port: &str| {
            let (address, _) = after(address)?.split_once('/')?;
            Some(SocketAddr::new(
                address.parse::<IpAddr>().ok()?,
                after(port)?.parse().ok()?,
            ))
        };
        let (from, to) = (end("-s", "--sport")?, end("-d", "--dport")?);
        let is_ours = ends.contains(&(from, to)) || ends.contains(&(to, from));
        is_ours.then(|| [&["-D"], &words[..]].concat())
    };
    rules.lines().filter_map(removal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCKED: &str = "-P INPUT ACCEPT\n-P OUTPUT ACCEPT\n-N CRIU\n-A INPUT -j CRIU\n\
        -A INPUT -s 10.0.0.0/8 -j ACCEPT\n-A OUTPUT -j CRIU\n\
        -A CRIU -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -j DROP\n";

    #[test]
    fn crius_chain_is_removed_and_nothing_else() {
        let removed = chain(LOCKED)
            .iter()
            .map(|words| words.join(" "))
            .collect::<Vec<_>>();
        assert_eq!(
            removed,
            ["-D INPUT -j CRIU", "-D OUTPUT -j CRIU", "-F CRIU", "-X CRIU"]
        );
        assert!(chain("-P INPUT ACCEPT\n-N CRIU\n-A INPUT -j CRIU\n-A CRIU -j DROP\n").is_empty());
    }

    #[test]
    fn the_chain_stays_while_a_second_dump_needs_it() {
        let jump = "-A INPUT -j CRIU\n";
        let rules = LOCKED.replace(jump, &jump.repeat(2));
        let removed = chain(&rules)
            .iter()
            .map(|words| words.join(" "))
            .collect::<Vec<_>>();
        assert_eq!(removed, ["-D INPUT -j CRIU", "-D OUTPUT -j CRIU"]);
    }

    #[test]
    fn of_the_hosts_rules_only_crius_for_these_connections_are_removed() {
        let rule = |from: (&str, u16), to: (&str, u16), mark: &str| {
            format!(
                "-A INPUT -s {} -d {} -p tcp -m mark ! --mark {mark} -m tcp --sport {} --dport {} -j DROP",
                from.0, to.0, from.1, to.1
            )
        };
        let (ours, theirs) = (("10.0.0.1/32", 7001), ("10.0.0.2/32", 40000));
        let rules = [
            rule(theirs, ours, MARK),
            rule(ours, theirs, MARK),
            rule(theirs, ours, "0x1"),
            rule(("10.0.0.3/32", 40000), ours, MARK),
            rule(("fd00::2/128", 5), ("fd00::1/128", 6), MARK),
            "-A INPUT -s 10.0.0.2/32 -p tcp -j DROP".to_owned(),
        ];
        let list = format!("-P INPUT ACCEPT\n{}\n", rules.join("\n"));
        let end = |text: &str| text.parse::<SocketAddr>().unwrap();
        let ends = BTreeSet::from([
            (end("10.0.0.1:7001"), end("10.0.0.2:40000")),
            (end("[fd00::1]:6"), end("[fd00::2]:5")),
        ]);
        let removed = connections(&list, &ends);
        let removed: Vec<_> = removed.iter().map(|words| words.join(" ")).collect();
        let expected = [0, 1, 4].map(|at: usize| rules[at].replacen("-A", "-D", 1));
        assert_eq!(removed, expected);
    }
}
