# Homebrew's formula for a tap. It has not been run: Homebrew was not at hand.
class DflashChat < Formula
  include Language::Python::Virtualenv

  desc "Chat with large language models, several tokens a pass and none of them changed"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # MLX's wheel has its Metal kernels compiled, which without it takes Xcode; so wheels are taken.
  def install
    virtualenv_create(libexec, "python3.13")
    system "python3.13", "-m", "pip", "--python=#{libexec}/bin/python", "install",
           "--constraint=constraints.txt", "#{buildpath}[serve]"
    bin.install_symlink libexec/"bin/dflash-chat", libexec/"bin/dflash-serve"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/dflash-chat --version")
    assert_match "--models-dir", shell_output("#{bin}/dflash-serve --help")
  end
end
