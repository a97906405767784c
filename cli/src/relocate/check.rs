//! What is known before the container stands still: whether the other node can take it.

use firn_config::{Config, Keys};
use firn_gpu::Gpu;
use firn_oci::Spec;
use firn_remap::Grant;

use crate::program;
use crate::restore::check::Node;

/// The GPUs that the container has here, with the driver's version; none if it has none. Runs firn-gpu: not
/// to be called by a future.
pub fn own_gpus(spec: &Spec) -> Option<(String, Vec<Gpu>)> {
    let config = Config::load(Keys::RESTORE).ok()?;
    let inventory = program::inventory(&config).ok()?;
    let grant = Grant::of_spec(spec, &inventory).ok()?;
    let gpus = Some(grant.gpus).filter(|gpus| !gpus.is_empty());
    gpus.map(|gpus| (inventory.driver_version, gpus))
}

/// Why the node cannot take a container with these GPUs under this name.
pub fn obstacle(node: &Node, name: &str, own: Option<&(String, Vec<Gpu>)>) -> Option<String> {
    if node.version != env!("CARGO_PKG_VERSION") {
        let (there, here) = (&node.version, env!("CARGO_PKG_VERSION"));
        return Some(format!("it has firn {there}, and this node {here}"));
    }
    if node.exists {
        return Some(format!("it has a container or a snapshot {name}"));
    }
    let (driver, gpus) = own?;
    let Some(there) = &node.inventory else {
        return Some("its GPUs cannot be read".to_owned());
    };
    if there.driver_version != *driver {
        let other = &there.driver_version;
        return Some(format!("its driver is {other}, and that of this node {driver}"));
    }
    let mut free: Vec<&Gpu> = there.gpus.iter().collect();
    for gpu in gpus {
        let fits = |other: &&Gpu| other.name == gpu.name && other.memory_total >= gpu.memory_total;
        match free.iter().position(fits) {
            Some(at) => drop(free.remove(at)),
            None => return Some(format!("it has no {} for {} any more", gpu.name, gpu.uuid)),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use firn_image::fixtures::inventory;

    use super::*;

    fn node(gpus: u32) -> Node {
        Node {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            exists: false,
            has_image: true,
            task: None,
            inventory: Some(inventory(195, gpus.try_into().unwrap())),
        }
    }

    #[test]
    fn the_other_node_needs_name_driver_and_gpus() {
        let here = node(2).inventory.unwrap();
        let own = (here.driver_version.clone(), here.gpus.clone());
        assert_eq!(obstacle(&node(2), "job", Some(&own)), None);
        let why = |node: &Node| obstacle(node, "job", Some(&own)).unwrap();
        assert!(why(&node(1)).contains("any more"));
        assert!(
            why(&Node {
                exists: true,
                ..node(2)
            })
            .contains("a container or a snapshot job")
        );
        assert!(
            why(&Node {
                inventory: None,
                ..node(2)
            })
            .contains("cannot be read")
        );
        assert!(
            why(&Node {
                version: "0.0.1".to_owned(),
                ..node(2)
            })
            .contains("firn 0.0.1")
        );
        let mut other = node(2);
        other.inventory.as_mut().unwrap().driver_version = "1.2".to_owned();
        assert!(why(&other).contains("its driver is 1.2"));
        // A container without GPUs needs none.
        assert_eq!(obstacle(&other, "job", None), None);
    }
}
