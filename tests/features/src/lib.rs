//! Has no code: see its Cargo.toml.
