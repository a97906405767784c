//! What is known before the container stands still: whether the other node can take it.

use crate::restore::check::Node;

/// Why the node cannot take a container under this name.
pub fn obstacle(node: &Node, name: &str) -> Option<String> {
    if node.version != env!("CARGO_PKG_VERSION") {
        let (there, here) = (&node.version, env!("CARGO_PKG_VERSION"));
        return Some(format!("it has firn {there}, and this node {here}"));
    }
    if node.exists {
        return Some(format!("it has a container or a snapshot {name}"));
    }
    if !node.has_looked {
        return Some("it has not looked whether it would restore the container".to_owned());
    }
    node.failure.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Node {
        Node {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            exists: false,
            has_image: true,
            task: None,
            has_looked: true,
            failure: None,
            map: None,
        }
    }

    #[test]
    fn the_other_node_needs_version_name_and_what_its_own_dry_run_looks_for() {
        assert_eq!(obstacle(&node(), "job"), None);
        let why = |node: &Node| obstacle(node, "job").unwrap();
        let taken = Node {
            exists: true,
            ..node()
        };
        assert!(why(&taken).contains("a container or a snapshot job"));
        let older = Node {
            version: "0.0.1".to_owned(),
            ..node()
        };
        assert!(why(&older).contains("firn 0.0.1"));
        let blind = Node {
            has_looked: false,
            ..node()
        };
        assert!(why(&blind).contains("has not looked"));
        let refused = Node {
            failure: Some("FIRN-GPU-OCCUPIED: full".to_owned()),
            ..node()
        };
        assert!(why(&refused).contains("FIRN-GPU-OCCUPIED"));
    }
}
