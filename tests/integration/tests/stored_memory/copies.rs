//! Image directories that are copied, with their memory put from the store into the image and back.

use anyhow::{Result, ensure};
use firn_lab::{Container, GC, GpuHost, on};
use firn_node::Platform;

use crate::stored_memory::{MIB, REST, STORE, extents, host, job, size};

/// It is restored from this directory, and continues behind `before`.
fn goes_on_from(host: &GpuHost, job: &Container<'_>, dir: &str, before: u64) -> Result<()> {
    host.node().run(&["firn", "restore", "--dir", dir, "job"])?;
    let lines = job.goes_on(3)?;
    ensure!(
        lines.0.iter().any(|line| line.iter == before + 1),
        "it was started afresh"
    );
    Ok(())
}

/// An image that has got its memory back from the store is restored without it.
pub fn an_exported_image_needs_no_store(platform: Platform) -> Result<()> {
    on([host(platform, "sm-export", 1)?], |[host]| {
        host.configure(STORE)?;
        let job = job(host, &["--runtime", host.runtime_for_options()?])?;
        job.checkpoint_and_exit("/srv/image")?;
        let before = job.lines()?.reached(1);
        job.task(&["delete"])?;
        let node = host.node();
        let exported = host.firn(&["store", "export", "/srv/image", "/srv/inline"])?;
        ensure!(exported["memory"].as_u64() >= Some(MIB << 20), "{exported}");
        let (image, inline) = (size(host, "/srv/image")?, size(host, "/srv/inline")?);
        ensure!(image < REST && inline >= MIB, "{image} MiB became {inline} MiB");
        node.run(&["rm", "-r", "/srv/store", "/srv/image"])?;
        host.configure("")?;
        let shown = node.run(&["firn", "inspect", "/srv/inline"])?.stdout;
        ensure!(!shown.contains("store"), "{shown}");

        goes_on_from(host, &job, "/srv/inline", before)?;
        job.remove()?;
        host.idle()
    })
}

/// The memory of an inline image goes into the store, and comes back from there.
pub fn an_imported_image_has_its_memory_in_the_store(platform: Platform) -> Result<()> {
    on([host(platform, "sm-import", 1)?], |[host]| {
        let job = job(host, &["--runtime", host.runtime_for_options()?])?;
        job.checkpoint_and_exit("/srv/image")?;
        let before = job.lines()?.reached(1);
        job.task(&["delete"])?;
        host.configure(STORE)?;
        let node = host.node();
        let imported = host.firn(&["store", "import", "/srv/image", "/srv/stored"])?;
        ensure!(
            imported["memory"]["bytes"].as_u64() >= Some(MIB << 20),
            "{imported}"
        );
        let (image, stored) = (size(host, "/srv/image")?, size(host, "/srv/stored")?);
        ensure!(image >= MIB && stored < REST, "{image} MiB became {stored} MiB");
        ensure!(!extents(host)?.is_empty(), "nothing is in the store");
        // Its index belongs to the directory.
        node.run(&GC)?;
        node.run(&["firn", "store", "export", "/srv/stored", "/srv/again"])?;
        node.run(&["rm", "-r", "/srv/image"])?;

        goes_on_from(host, &job, "/srv/stored", before)?;
        job.remove()?;
        host.idle()
    })
}
