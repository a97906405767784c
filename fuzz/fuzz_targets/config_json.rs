#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    firn_shim::fuzz::config_json(data);
    firn_remap::fuzz::spec(data);
});
