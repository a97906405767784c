#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_shim::fuzz::runtime_output(data));
