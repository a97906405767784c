//! A network cable between two nodes.

use std::net::Ipv4Addr;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::host;
use crate::node::Node;

/// Two nodes joined by a veth pair, which goes with either of them. Each knows the other by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Address of the first node.
    pub a: Ipv4Addr,
    /// Address of the second node.
    pub b: Ipv4Addr,
}

/// Joins two nodes with a network of their own, 10.77.N.0/24.
pub fn link(a: &Node, b: &Node) -> Result<Link> {
    host::require_root()?;
    host::require(&[("ip", "iproute2")])?;
    let subnet = free_subnet(&[addresses(a)?, addresses(b)?].concat())?;
    let link = Link {
        a: Ipv4Addr::new(10, 77, subnet, 1),
        b: Ipv4Addr::new(10, 77, subnet, 2),
    };
    let device = format!("firn{subnet}");
    // The host's ip, because only the host sees both nodes; in a's network namespace, so the host's own stays
    // as it is.
    let mut pair = in_net(a);
    pair.args([
        "ip", "link", "add", &device, "type", "veth", "peer", "name", &device, "netns",
    ]);
    host::run(pair.arg(b.pid().to_string()))
        .with_context(|| format!("link nodes {} and {}", a.name(), b.name()))?;
    for (node, own, peer, other) in [(a, link.a, b, link.b), (b, link.b, a, link.a)] {
        node.run(&["ip", "address", "add", &format!("{own}/24"), "dev", &device])?;
        node.run(&["ip", "link", "set", &device, "up"])?;
        let hosts = node.read("/etc/hosts")?;
        node.write("/etc/hosts", format!("{hosts}{other} {}\n", peer.name()))?;
    }
    Ok(link)
}

fn in_net(node: &Node) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--target={}", node.pid()))
        .args(["--net", "--"]);
    command
}

fn addresses(node: &Node) -> Result<Vec<Ipv4Addr>> {
    Ok(parse_addresses(
        &node.run(&["ip", "-4", "-oneline", "address"])?.stdout,
    ))
}

fn parse_addresses(text: &str) -> Vec<Ipv4Addr> {
    let address = |line: &str| line.split_whitespace().nth(3)?.split('/').next()?.parse().ok();
    text.lines().filter_map(address).collect()
}

/// The first N of 10.77.N.0/24 in which there is no address yet.
fn free_subnet(taken: &[Ipv4Addr]) -> Result<u8> {
    let free = |n: &u8| !taken.iter().any(|address| address.octets()[..3] == [10, 77, *n]);
    match (0..=u8::MAX).find(free) {
        Some(n) => Ok(n),
        None => bail!("no network is left for another link"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_link_gets_another_network() {
        let shown = "1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever\n\
                     2: firn0    inet 10.77.0.1/24 scope global firn0\\       valid_lft forever\n";
        let taken = parse_addresses(shown);
        assert_eq!(taken, [Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 77, 0, 1)]);
        assert_eq!(free_subnet(&taken).unwrap(), 1);
        assert_eq!(free_subnet(&[]).unwrap(), 0);
        let all: Vec<_> = (0..=255).map(|n| Ipv4Addr::new(10, 77, n, 2)).collect();
        assert!(free_subnet(&all).is_err());
    }
}
