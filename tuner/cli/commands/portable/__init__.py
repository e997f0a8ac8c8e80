"""Commands of files that go to other machines: packs, exports, signatures."""
