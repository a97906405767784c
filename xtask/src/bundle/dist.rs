//! `cargo xtask dist`: a release, as operators get it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use firn_node::Image;

use super::gpu::{build, have_target};
use super::{check, copy_into, deb, install_missing, mib, output, sbom, write_out};
use crate::tools::cargo;
use crate::workspace;

const MUSL: &str = "x86_64-unknown-linux-musl";
/// Without the shim, which is linked statically.
const DYNAMIC: [&str; 4] = ["firn-gpu", "firn-hook", "firn-runc", "firn"];
const PLUGIN: &str = "libfirn_criu.so";
const SHIM: &str = "containerd-shim-firn-v2";

/// Make a release: an archive of the programs, a Debian package, and the image that installs them in a
/// cluster
///
/// Writes to DIR firn-VERSION-ARCH.tar.xz (the programs, config/ and LICENSE), firn_VERSION_ARCH.deb (with
/// manual pages, completions and units for systemd), image/ (what config/Containerfile copies),
/// firn-image-VERSION.tar (the same image without a builder, for `ctr images import` or `skopeo copy
/// oci-archive:`), firn-VERSION.cdx.json (what all of it is built from, as CycloneDX has it), and SHA256SUMS.
/// The same sources make the same bytes with the same compiler.
#[derive(clap::Args)]
pub struct Cmd {
    /// Where the release is written
    #[arg(long, value_name = "DIR", default_value = "target/dist")]
    out: PathBuf,
    /// Only make the Debian package, of the programs that are in this directory
    #[arg(long, value_name = "DIR")]
    deb_of: Option<PathBuf>,
}

pub fn run(cmd: &Cmd) -> Result<()> {
    install_missing(&[("dpkg-deb", "dpkg"), ("readelf", "binutils"), ("xz", "xz-utils")])?;
    let workspace = workspace()?;
    if let Some(programs) = &cmd.deb_of {
        fs::create_dir_all(&cmd.out).with_context(|| format!("make {}", cmd.out.display()))?;
        println!("{}", deb::build(&workspace, programs, &cmd.out)?.display());
        return Ok(());
    }
    ensure!(
        have_target(&workspace, MUSL)?,
        "the static programs need the target {MUSL}\nhint: rustup target add {MUSL}"
    );
    let out = workspace.join(&cmd.out);
    fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    let version = env!("CARGO_PKG_VERSION");
    let stage = tempfile::tempdir()?;
    let name = format!("firn-{version}-{}", std::env::consts::ARCH);
    let release = stage.path().join(&name);
    let fixed = programs(&workspace, &release)?;
    for file in ["LICENSE", "config"] {
        check(
            Command::new("cp")
                .args(["-a", "--"])
                .arg(workspace.join(file))
                .arg(&release),
        )?;
    }
    let archive = out.join(format!("{name}.tar.xz"));
    let packed = write_out(stage.path(), &archive)?;
    println!("{}: {}", archive.display(), mib(packed));
    let package = deb::build(&workspace, &release, &out)?;
    let sbom = format!("firn-{version}.cdx.json");
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    fs::write(out.join(&sbom), sbom::document(&workspace, &target)?)?;
    let image = image(&out, &release, &fixed)?;
    let package = package.file_name().context("a package has a name")?;
    sums(
        &out,
        &[
            &format!("{name}.tar.xz"),
            &package.to_string_lossy(),
            &sbom,
            &image,
        ],
    )
}

/// Makes the image, and the directory of which config/Containerfile makes it. Returns the archive's name.
fn image(out: &Path, release: &Path, fixed: &Path) -> Result<String> {
    let image = out.join("image");
    if image.exists() {
        fs::remove_dir_all(&image)?;
    }
    fs::create_dir_all(image.join("release"))?;
    copy_into(fixed, &image)?;
    for name in firn_lab::PROGRAMS {
        copy_into(&release.join(name), &image.join("release"))?;
    }
    let work = tempfile::tempdir()?;
    let version = env!("CARGO_PKG_VERSION");
    let reference = format!("registry.example/firn:{version}");
    let built = Image::new(reference).entrypoint("/firn").command(&[]);
    let packed = built.archive(&image, work.path())?;
    let name = format!("firn-image-{version}.tar");
    let archive = out.join(&name);
    fs::copy(packed, &archive)?;
    println!("{}: {}", archive.display(), mib(fs::metadata(&archive)?.len()));
    Ok(name)
}

/// Builds the programs into the directory. Returns the statically linked `firn`, for an image that has no C
/// library.
fn programs(workspace: &Path, release: &Path) -> Result<PathBuf> {
    fs::create_dir_all(release)?;
    let fixed = build(workspace, &[SHIM, "firn"], Some(MUSL))?;
    copy_into(&fixed.join(SHIM), release)?;
    let built = build(workspace, &DYNAMIC, None)?;
    let plugin = ["build", "--release", "--locked", "--package", "firn-criu-plugin"];
    check(cargo().args(plugin).current_dir(workspace))?;
    for name in DYNAMIC.into_iter().chain([PLUGIN]) {
        copy_into(&built.join(name), release)?;
    }
    Ok(fixed.join("firn"))
}

fn sums(out: &Path, files: &[&str]) -> Result<()> {
    let sums = output(Command::new("sha256sum").args(files).current_dir(out))?;
    fs::write(out.join("SHA256SUMS"), &sums)?;
    print!("{sums}");
    Ok(())
}
