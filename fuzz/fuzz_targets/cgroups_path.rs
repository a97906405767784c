#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_process::fuzz::cgroups_path(data));
