//! Links the static shim with the code of transactions apart: see layout.ld.

fn main() {
    println!("cargo::rerun-if-changed=layout.ld");
    // Cargo sets these for every build script.
    let is_static = std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|env| env == "musl");
    let dir = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    if is_static {
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{dir}/layout.ld");
    }
}
